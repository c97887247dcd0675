"""How processes end, in words."""

from __future__ import annotations

import signal

from lightning_sdpipe.supervision.events import Ended

INTERRUPTED = 128
"""Plus the number of a signal: the exit code of what it ended."""


def how(end: Ended) -> str:
    """What goes on a sentence that begins with the process."""
    if end.code == -signal.SIGKILL:
        return " killed"
    if end.code == -signal.SIGTERM or end.code == INTERRUPTED + signal.SIGTERM:
        return " ended by SIGTERM"
    if end.code < 0:
        return f" ended by {signal_name(-end.code)}"
    if end.raised is not None:
        return f": {end.raised}"
    return f" ended with exit code {end.code}"


def signal_name(number: int) -> str:
    """As the system calls it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
