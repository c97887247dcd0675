"""Events of a run that a policy hears of.

A policy hears of every event in order, with its time. Nothing else reaches it: no clock, no socket, no message.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A count in a message: counting on from it stays within 64 bits."""
Last: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)]
"""Number of the last item, or -1 before the first."""
SEGMENT = 1 << 40
"""More averages than a segment of training has. Averages beside training are numbered from a new multiple in each."""
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
"""A duration in a message."""


class Worker(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Worker (j, i) of SDPipe §3: runs stage ``stage`` of pipeline ``pipeline``, both from 0."""

    stage: Count
    pipeline: Count

    def __str__(self) -> str:
        return f"(stage {self.stage}, pipeline {self.pipeline})"


class Ready(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="ready"):
    """The local step of ``iteration`` is finished, or needs no other worker, and ``worker`` waits for a group.

    Where replicas take over the outcome of every round, its model ``contains`` that many rounds. ``again`` says that
    its last round broke off: it goes on once it has the outcome of that one.
    """

    worker: Worker
    iteration: int
    contains: Count | None = None
    again: bool = False


class Progress(msgspec.Struct, frozen=True, gc=False, tag="progress"):
    """``worker`` has made ``steps`` steps since its last report, the newest being ``iteration``.

    A step took ``seconds`` on average, of which the worker spent ``waiting`` on other replicas.
    """

    worker: Worker
    iteration: int
    steps: int
    seconds: float
    waiting: float


class Joined(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="joined"):
    """``worker`` takes part from now on. Its iterations may start anywhere, or after ``answered``, the last that an
    earlier scheduler answered."""

    worker: Worker
    answered: int | None = None


class Contains(msgspec.Struct, frozen=True, gc=False, tag="contains"):
    """``worker`` has taken over the outcome of a round: its model contains ``rounds`` of them."""

    worker: Worker
    rounds: Count


class Left(msgspec.Struct, frozen=True, gc=False, tag="left"):
    """``worker`` pauses or ends its epoch: no worker waits for it, and its unanswered ready is void."""

    worker: Worker


class Lost(msgspec.Struct, frozen=True, gc=False, tag="lost"):
    """``worker`` is lost: its pipeline of an elastic run died or fell silent. It counts as having left, and may join
    again once its pipeline has restarted."""

    worker: Worker


class Vanished(msgspec.Struct, frozen=True, gc=False, tag="vanished"):
    """The process of ``worker``, which had left before, has ended."""

    worker: Worker


class Restarted(msgspec.Struct, frozen=True, gc=False, tag="restarted"):
    """The scheduler has started in the middle of an elastic run: all groups below ``next_sequence`` have gone out, or
    were decided and are void."""

    next_sequence: int


class Widened(msgspec.Struct, frozen=True, gc=False, tag="widened"):
    """An elastic run grows: pipelines below ``num_pipelines``, more than were planned, may join from now on."""

    num_pipelines: int


class Tick(msgspec.Struct, frozen=True, gc=False, tag="tick"):
    """Time has passed; due when the policy's deadline says so, harmless at any other time."""


Event: TypeAlias = Ready | Contains | Progress | Joined | Left | Lost | Vanished | Restarted | Widened | Tick
