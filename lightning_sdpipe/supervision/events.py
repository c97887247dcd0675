"""What a supervisor hears of, and what it decides: the two sides of :mod:`~lightning_sdpipe.supervision.rules`.

How processes end, in words.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_sdpipe.supervision.uncaught_exception import UncaughtException

# --------------------------------------------------------------------- events


@dataclass(frozen=True)
class Begin:
    """The scheduler listens."""


@dataclass(frozen=True)
class ProcessEnded:
    """A process has ended: with ``code``, or by the signal −``code``; ``raised`` left its script before."""

    pipeline: int
    rank: int
    code: int
    raised: UncaughtException | None = None


@dataclass(frozen=True)
class Raising:
    """The exception ``raised`` has left the script of a process, which has yet to end."""

    pipeline: int
    rank: int
    raised: UncaughtException


@dataclass(frozen=True)
class Seen:
    """What the scheduler answered to a question that was asked at ``asked``.

    ``lives`` has the pipelines that train, each with what tells this life of it from others; ``leader`` leads them.
    ``update`` is how far the furthest is, ``ever`` are those that ever trained; ``gone`` has lives that it has given
    up, and why. ``failure`` is what ended the run, if anything; ``resumed`` the checkpoint from which it went on when
    none was left.
    """

    asked: float
    lives: Mapping[int, str]
    leader: int | None = None
    update: int | None = None
    ever: frozenset[int] = frozenset()
    gone: Mapping[str, str] = field(default_factory=dict)
    failure: str | None = None
    resumed: str | None = None


@dataclass(frozen=True)
class SchedulerEnded:
    """The scheduler's process has ended."""

    code: int


@dataclass(frozen=True)
class SignalReceived:
    """The supervisor got this signal."""

    signal: int


@dataclass(frozen=True)
class TimePassed:
    """Time has passed."""


Event: TypeAlias = Begin | ProcessEnded | Raising | Seen | SchedulerEnded | SignalReceived | TimePassed

# ------------------------------------------------------------------ decisions


@dataclass(frozen=True)
class Launch:
    """Start the processes of a pipeline; ``again`` counts how often that was done before."""

    pipeline: int
    again: int


@dataclass(frozen=True)
class LaunchScheduler:
    """Start the scheduler again, at the same address."""


@dataclass(frozen=True)
class Stop:
    """Send a signal to those processes of the pipeline that live."""

    pipeline: int
    signal: int


@dataclass(frozen=True)
class Show:
    """The terminal is this pipeline's."""

    pipeline: int


@dataclass(frozen=True)
class Say:
    """A line for the user."""

    line: str


@dataclass(frozen=True)
class Finish:
    """Nothing runs any more; ``code`` is the exit code of the run."""

    code: int


Decision: TypeAlias = Launch | LaunchScheduler | Stop | Show | Say | Finish


INTERRUPTED = 128
"""Plus the number of a signal: the exit code of what it ended."""


def how(end: ProcessEnded) -> str:
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
