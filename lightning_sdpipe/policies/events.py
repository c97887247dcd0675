"""What happens in a run, in the words in which a policy is told of it.

A policy hears of every event in order, with its time. Nothing else reaches it: no clock, no socket, no message.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""An integer that a message may hold: counting on from it stays within 64 bits."""
Last: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)]
"""The number of what was last, or -1 before the first."""
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
"""A length of time that a message may hold."""


class Worker(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Worker (j, i) of SDPipe §3: runs stage ``stage`` of pipeline ``pipeline``, both from 0."""

    stage: Count
    pipeline: Count

    def __str__(self) -> str:
        return f"(stage {self.stage}, pipeline {self.pipeline})"


class Ready(msgspec.Struct, frozen=True, gc=False, tag="ready"):
    """``worker`` has finished the local step of ``iteration``, or needs no other for it, and waits for a group."""

    worker: Worker
    iteration: int


class Progress(msgspec.Struct, frozen=True, gc=False, tag="progress"):
    """``worker`` goes on: ``steps`` steps since the last report, the newest being ``iteration``.

    ``seconds`` is the mean length of one of them, of which ``waiting`` passed in waiting for other replicas.
    """

    worker: Worker
    iteration: int
    steps: int
    seconds: float
    waiting: float


class Joined(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="joined"):
    """``worker`` takes part from now on; its iterations may start anywhere, or after ``answered``, which another
    scheduler has answered."""

    worker: Worker
    answered: int | None = None


class Left(msgspec.Struct, frozen=True, gc=False, tag="left"):
    """``worker`` pauses or has ended its epoch: none waits for it, and its unanswered ready is void."""

    worker: Worker


class Lost(msgspec.Struct, frozen=True, gc=False, tag="lost"):
    """``worker`` was silent for so long that it is taken to have left. It may join again."""

    worker: Worker


class Broken(msgspec.Struct, frozen=True, gc=False, tag="broken"):
    """The members of group ``sequence`` did not average after all; several of them may say so."""

    sequence: int


class Restarted(msgspec.Struct, frozen=True, gc=False, tag="restarted"):
    """The scheduler was started in the middle of a run, in which all groups below ``next_sequence`` have been."""

    next_sequence: int


class Answered(msgspec.Struct, frozen=True, gc=False, tag="answered"):
    """``worker`` came with ``iteration``, and gets the answer that another scheduler decided before it was no more."""

    worker: Worker
    iteration: int


class Regrouped(msgspec.Struct, frozen=True, gc=False, tag="regrouped"):
    """The group ``sequence`` broke; ``members`` of it, of which each had the part ``weights`` in it, try again.

    They wait for that, but not for an answer to a ready. The one decision that follows is a group of just these.
    """

    sequence: int
    members: tuple[Worker, ...]
    weights: tuple[float, ...]


class Widened(msgspec.Struct, frozen=True, gc=False, tag="widened"):
    """From now on pipelines below ``num_pipelines`` may join: more than were planned, in an elastic run."""

    num_pipelines: int


class Tick(msgspec.Struct, frozen=True, gc=False, tag="tick"):
    """Time passed; due when the policy's deadline says so, harmless at any other time."""


Event: TypeAlias = Ready | Progress | Joined | Left | Lost | Broken | Restarted | Answered | Regrouped | Widened | Tick
