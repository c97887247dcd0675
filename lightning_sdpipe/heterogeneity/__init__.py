"""Slowness on demand: injected delays, slow devices, replayed traces, and emulated compute.

Only emulated compute needs torch, which is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_sdpipe.heterogeneity.delays import Delays, condition
from lightning_sdpipe.heterogeneity.injector import DelayInjector, Heterogeneity
from lightning_sdpipe.heterogeneity.slowdowns import Slowed, Static, Trace
from lightning_sdpipe.heterogeneity.tracks import Track, read_tracks, write_tracks

if TYPE_CHECKING:
    from lightning_sdpipe.heterogeneity.emulate import EmulatedBlock as EmulatedBlock

__all__ = [
    "DelayInjector",
    "Delays",
    "EmulatedBlock",
    "Heterogeneity",
    "Slowed",
    "Static",
    "Trace",
    "Track",
    "condition",
    "read_tracks",
    "write_tracks",
]


def __getattr__(name: str) -> Any:
    if name != "EmulatedBlock":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_sdpipe.heterogeneity.emulate import EmulatedBlock

    return EmulatedBlock
