"""The words that every grouping policy speaks: workers, groups, reasons, and the policy protocol.

A policy is sans I/O: events and the time go in, groups come out. It owns no clock, socket, thread or random
source, so the server, the simulator and the tests drive the same object. The rules that all policies share:

- A worker is a node of its stage between ``join`` and ``leave``.
- A worker has at most one unanswered ``ready``; every ``ready`` is answered by exactly one group that
  contains the worker, unless the worker leaves first.
- An event that breaks a rule raises :class:`RefusedEvent` and changes nothing.
- Time never runs backwards between two calls.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec


class RefusedEvent(ValueError):
    """The event breaks a rule of the protocol; the policy is as it was before."""


class Worker(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Worker (j, i) of SDPipe §3: runs stage ``stage`` of pipeline ``pipeline``, both from 0."""

    stage: int
    pipeline: int

    def __str__(self) -> str:
        return f"(stage {self.stage}, pipeline {self.pipeline})"


class Reason(Enum):
    """Why a group went out when it did."""

    WINDOW_CLOSED = "window closed"
    """The window ended and the recent groups plus this one connect the stage."""
    EVERYBODY_CAME = "everybody came"
    """Every active worker of the stage was ready: nobody was left to wait for."""
    ENFORCED = "enforced"
    """The stage waited, holding the token, until the sync-graph was connected (SDPipe §3.4)."""
    TOKEN_BUSY = "token busy"
    """The sync-graph is not connected, but another stage holds the token: waiting could deadlock."""
    WORKER_LOST = "worker lost"
    """The workers it waited for left or fell silent, and the remaining ones need wait no longer."""
    MATCHED = "matched"
    """The workers were drawn to average with each other (AD-PSGD)."""
    LOCAL_STEP = "local step"
    """The policy has the worker go on alone this time."""

    __hash__ = object.__hash__  # Enum's own is Python code, and reasons are counted for every group


class Group(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Workers of one stage that average their models now.

    ``members`` is sorted; ``weights`` belong to the members in that order and add up to 1; ``sequence`` is
    unique in the run and increasing. ``passive`` members were not ready: they average while they compute.
    Only asynchronous AD-PSGD makes such groups.
    """

    members: tuple[Worker, ...]
    weights: tuple[float, ...]
    sequence: int
    reason: Reason
    passive: tuple[Worker, ...] = ()

    @property
    def stage(self) -> int:
        """The stage all members belong to."""
        return self.members[0].stage


class GroupPolicy(Protocol):
    """Decides, for all stages at once, which ready workers form a group."""

    def ready(self, worker: Worker, iteration: int, now: float) -> list[Group]:
        """``worker`` finished the local step of ``iteration`` and waits for a group."""

    def leave(self, worker: Worker, now: float) -> list[Group]:
        """``worker`` ends its epoch, pauses or is presumed dead: nobody waits for it; its ready is void."""

    def join(self, worker: Worker, now: float) -> list[Group]:
        """``worker`` takes part from now on."""

    def tick(self, now: float) -> list[Group]:
        """Time passed; due when :meth:`deadline` says so, harmless at any other time."""

    def deadline(self) -> float | None:
        """When :meth:`tick` is due next; None when only another event can change anything."""
