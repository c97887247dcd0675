"""Slowness on demand: injected delays, slow devices, replayed traces, and emulated compute."""

from lightning_sdpipe.heterogeneity.delays import Delays, ThroughputBound, bound, condition
from lightning_sdpipe.heterogeneity.emulate import EmulatedBlock
from lightning_sdpipe.heterogeneity.injector import DelayInjector, Heterogeneity
from lightning_sdpipe.heterogeneity.slowdowns import Slowed, Static, Trace
from lightning_sdpipe.heterogeneity.tracks import Track, read_tracks, write_tracks

__all__ = [
    "DelayInjector",
    "Delays",
    "EmulatedBlock",
    "Heterogeneity",
    "Slowed",
    "Static",
    "ThroughputBound",
    "Trace",
    "Track",
    "bound",
    "condition",
    "read_tracks",
    "write_tracks",
]
