"""Slowness on demand: injected delays, replayed traces, and emulated compute."""

from lightning_sdpipe.heterogeneity.delays import (
    DelayInjector,
    Delays,
    ThroughputBound,
    bound,
    condition,
    drawn_delay,
)
from lightning_sdpipe.heterogeneity.emulate import EmulatedBlock

__all__ = [
    "DelayInjector",
    "Delays",
    "EmulatedBlock",
    "ThroughputBound",
    "bound",
    "condition",
    "drawn_delay",
]
