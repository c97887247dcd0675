"""Events and decisions of a supervisor: the two sides of :mod:`~lightning_sdpipe.supervision.rules`.

The module also describes in words how processes end.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_sdpipe.supervision.script import UncaughtException

# --------------------------------------------------------------------- events


@dataclass(frozen=True)
class Begin:
    """The scheduler listens."""


@dataclass(frozen=True)
class ProcessEnded:
    """A process has ended: with ``code``, or by the signal −``code``; the exception ``raised`` had left its script
    before."""

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
    """The scheduler's answer to a question that was asked at ``asked``.

    ``lives`` maps the pipelines that train to a name of their present life; ``leader`` leads them. ``update`` is the
    update of the furthest pipeline, ``ever`` are the pipelines that ever trained; ``gone`` has lives that the scheduler
    has given up, and why. ``failure`` is what ended the run, if anything; ``resumed`` is the checkpoint from which it
    went on when no pipeline was left.
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
    """Start the processes of a pipeline; ``again`` counts its earlier starts."""

    pipeline: int
    again: int


@dataclass(frozen=True)
class LaunchScheduler:
    """Start the scheduler again, at the same address."""


@dataclass(frozen=True)
class Stop:
    """Send a signal to the live processes of the pipeline."""

    pipeline: int
    signal: int


@dataclass(frozen=True)
class Show:
    """Show this pipeline's output on the terminal."""

    pipeline: int


@dataclass(frozen=True)
class Say:
    """Print a line for the user."""

    line: str


@dataclass(frozen=True)
class Finish:
    """All processes have ended; ``code`` is the exit code of the run."""

    code: int


Decision: TypeAlias = Launch | LaunchScheduler | Stop | Show | Say | Finish


INTERRUPTED = 128
"""Base of the exit code of what a signal ended; the number of the signal is added to it."""


def how(end: ProcessEnded) -> str:
    """Return the continuation of a sentence that begins with the process."""
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
    """Return the system's name of the signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
