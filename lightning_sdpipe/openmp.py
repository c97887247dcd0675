"""Ends OpenMP's threads, which do not survive a fork."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_SOFT = 1  # omp_pause_soft: settings stay


def end_threads() -> None:
    """End the threads that GNU's OpenMP keeps for the calling thread; the next parallel region starts them again.

    A forked child inherits the record of these threads but not the threads, and its first parallel region waits for
    them forever. Called right before a fork, this leaves parent and child with none. Other implementations of OpenMP
    start afresh in a child. A process may have loaded several copies of GNU's: torch brings one, and so does
    scikit-learn.
    """
    if sys.platform != "linux":
        return
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in sorted({line[line.index("/") :] for line in lines if "/libgomp" in line}):
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)  # since OpenMP 5.0
        if pause is not None:
            pause(_SOFT)
