"""Events of a run that a policy hears of.

A policy hears of every event in order, with its time. Nothing else reaches it: no clock, no socket, no message.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Integer that a message may hold: counting on from it stays within 64 bits."""
Last: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)]
"""Number of the last item, or -1 before the first."""
SEGMENT = 1 << 40
"""More averages than a segment of training has. Those beside training are numbered on from a multiple of it in each."""
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
"""Length of time that a message may hold."""


class Worker(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Worker (j, i) of SDPipe §3: runs stage ``stage`` of pipeline ``pipeline``, both from 0."""

    stage: Count
    pipeline: Count

    def __str__(self) -> str:
        return f"(stage {self.stage}, pipeline {self.pipeline})"


class Ready(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="ready"):
    """The local step of ``iteration`` is finished, or needs no other worker, and ``worker`` waits for a group.

    Where replicas take over the outcome of every round, its model ``contains`` those of so many rounds. It says so
    ``again`` if its last round has broken off: it goes on when it has the outcome of that one.
    """

    worker: Worker
    iteration: int
    contains: Count | None = None
    again: bool = False


class Progress(msgspec.Struct, frozen=True, gc=False, tag="progress"):
    """A report of ``worker``: it made ``steps`` steps since the last one, the newest being ``iteration``.

    ``seconds`` is the mean length of a step, of which ``waiting`` passed in waiting for other replicas.
    """

    worker: Worker
    iteration: int
    steps: int
    seconds: float
    waiting: float


class Joined(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="joined"):
    """Start of ``worker``'s participation; its iterations may start anywhere, or after ``answered``, which another
    scheduler has answered."""

    worker: Worker
    answered: int | None = None


class Contains(msgspec.Struct, frozen=True, gc=False, tag="contains"):
    """Outcome of a round that ``worker`` has taken over: its model contains those of ``rounds``."""

    worker: Worker
    rounds: Count


class Left(msgspec.Struct, frozen=True, gc=False, tag="left"):
    """Pause of ``worker``, or end of its epoch: no worker waits for it, and its unanswered ready is void."""

    worker: Worker


class Lost(msgspec.Struct, frozen=True, gc=False, tag="lost"):
    """Loss of ``worker``, whose pipeline of an elastic run died or fell silent. It counts as having left, and may join
    again when its pipeline has started again."""

    worker: Worker


class Vanished(msgspec.Struct, frozen=True, gc=False, tag="vanished"):
    """End of the process of ``worker``, which had left before."""

    worker: Worker


class Restarted(msgspec.Struct, frozen=True, gc=False, tag="restarted"):
    """Start of the scheduler in the middle of an elastic run, in which all groups below ``next_sequence`` have gone
    out, or were decided and are void."""

    next_sequence: int


class Widened(msgspec.Struct, frozen=True, gc=False, tag="widened"):
    """Growth of an elastic run: pipelines below ``num_pipelines``, more than were planned, may join from now on."""

    num_pipelines: int


class Tick(msgspec.Struct, frozen=True, gc=False, tag="tick"):
    """Passage of time; due when the policy's deadline says so, harmless at any other time."""


Event: TypeAlias = Ready | Contains | Progress | Joined | Left | Lost | Vanished | Restarted | Widened | Tick
