"""Events and decisions of membership: what pipelines report, and what is decided about them.

A *pipeline* is the unit that comes and goes. An *incarnation* is one start of its job: a number drawn by its first
stage, the same for all stages. An *epoch of membership* is a list of members; a new one begins whenever that changes.
:mod:`lightning_sdpipe.membership.membership` decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from lightning_sdpipe.policies.events import Count, Worker


class Member(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """A pipeline that takes part, and the incarnation of its job."""

    pipeline: Count
    incarnation: Count


class Epoch(msgspec.Struct, frozen=True, omit_defaults=True, tag="epoch"):
    """From now on ``members`` are in the run, the oldest first; ``lost`` are pipelines that no longer are."""

    number: Count
    members: tuple[Member, ...]
    reason: str
    lost: tuple[Count, ...] = ()
    tries: bool = False
    """True if every worker is to say which workers of its stage it cannot reach."""
    starts: Count = 0
    """New starts from a checkpoint before this epoch, each made when no member was left; a state from before one is
    void."""

    @property
    def pipelines(self) -> tuple[int, ...]:
        """Pipelines of the members, sorted: their ranks in a process group of this epoch."""
        return tuple(sorted(member.pipeline for member in self.members))


class Exchanging(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A worker averages with the workers of its stage in ``pipelines``, and its connections have ``moved`` that many
    bytes."""

    sequence: Count
    pipelines: tuple[Count, ...]
    moved: Count


# ------------------------------------------------------------------------------------------------- what is heard


FIXED = {"pipelines": "fixed"}
"""Fingerprint of a process of a run whose pipelines neither come nor go."""


def is_fixed(fingerprint: Mapping[str, str]) -> bool:
    """Return whether ``fingerprint`` is that of a process of such a run."""
    return fingerprint == FIXED


class _FromWorker(msgspec.Struct, frozen=True, gc=False):
    worker: Worker
    incarnation: int


class Enrolled(_FromWorker, frozen=True, tag="enrolled"):
    """The process wants to take part; ``fingerprint`` names what must be equal in all pipelines of a run. ``epoch``
    is the newest that it heard of, if any; another scheduler's, if this one has had none."""

    fingerprint: dict[str, str]
    epoch: Epoch | None = None


class Resumed(_FromWorker, frozen=True, tag="resumed"):
    """The process is a member, as far as it knows; ``epoch`` is the newest that it heard of. ``met`` are barriers that
    it heard of and that another member may not have."""

    fingerprint: dict[str, str]
    epoch: Epoch
    met: tuple[Met, ...] = ()


class Snapshot(_FromWorker, frozen=True, tag="snapshot"):
    """The worker of a donor has copied its state for ``transfer`` after ``update`` updates."""

    transfer: str
    update: int


class Received(_FromWorker, frozen=True, omit_defaults=True, tag="received"):
    """The worker of a newcomer has the state of ``transfer`` after ``update`` updates; or ``missed`` says why it does
    not."""

    transfer: str
    update: int
    missed: str = ""


class Meets(_FromWorker, frozen=True, tag="meets"):
    """The worker waits at ``key`` for the other replicas of its stage; ``value`` is for them."""

    key: str
    value: bytes


class Ended(_FromWorker, frozen=True, omit_defaults=True, tag="died"):
    """The process has ended; or it has not been heard of for too long, or ends through an exception."""

    reason: str
    how: Literal["ended", "silent", "failed"] = "ended"


class Departed(_FromWorker, frozen=True, tag="departed"):
    """The process ends: it was told to, or has ``finished`` its training."""

    finished: bool


class Heard(_FromWorker, frozen=True, tag="heard"):
    """The process lives; told only of processes that :meth:`Membership.doubts` names."""


class Unreachable(msgspec.Struct, frozen=True, gc=False, tag="unreachable"):
    """Workers of ``stage`` in ``pipelines`` have found no process group that holds them all, though they ``waited``; or
    an exchange between them broke off, though all are there."""

    stage: int
    pipelines: tuple[int, ...]
    waited: bool = True


class Misses(_FromWorker, frozen=True, tag="misses"):
    """In that epoch, which tries, the worker could not reach the workers of its stage in ``pipelines``."""

    epoch: int
    pipelines: tuple[int, ...]


class Published(_FromWorker, frozen=True, tag="published"):
    """The leader has written the state after ``update`` updates to ``path``."""

    path: str
    update: int


class Passed(msgspec.Struct, frozen=True, gc=False, tag="passed"):
    """Time passed; due at :meth:`Membership.deadline`."""


FromProcess: TypeAlias = Snapshot | Received | Meets | Ended | Departed | Misses | Published
"""Events of a process that has enrolled."""
MemberEvent: TypeAlias = FromProcess | Enrolled | Resumed | Heard | Unreachable | Passed


# ------------------------------------------------------------------------------------------------ what is decided


class Started(msgspec.Struct, frozen=True, gc=False, tag="started"):
    """The ``pipeline`` is a member from ``epoch`` on, and trains. ``fresh``: no member could give it a state; it goes
    on from the file ``checkpoint``, if that is named."""

    pipeline: int
    epoch: Epoch
    fresh: bool
    checkpoint: str = ""


class Receive(msgspec.Struct, frozen=True, gc=False, tag="receive"):
    """The ``pipeline`` gets its state from ``donor``, all of whose stages have taken a snapshot for ``transfer``."""

    pipeline: int
    donor: int
    transfer: str
    update: int


class Donate(msgspec.Struct, frozen=True, gc=False, tag="donate"):
    """The ``donor`` copies its state between two turns, and gives it to ``pipeline``. Its stage 0 says which turns."""

    donor: int
    pipeline: int
    transfer: str


class Abandoned(msgspec.Struct, frozen=True, gc=False, tag="abandoned"):
    """No pipeline waits for ``transfer`` of ``donor`` any more; ``void`` says what was wrong with it, if anything."""

    donor: int
    transfer: str
    void: str = ""


class Met(msgspec.Struct, frozen=True, gc=False, tag="met"):
    """The workers of ``stage`` in ``pipelines`` (sorted) are all at ``key``; ``values`` are theirs, in that order.

    ``epoch`` names a process group that holds them all. ``past``: others have passed the barrier before; this worker is
    late, and alone.
    """

    stage: Count
    key: str
    pipelines: tuple[Count, ...]
    values: tuple[bytes, ...]
    sequence: Count
    epoch: Count = 0
    past: bool = False


class Gone(msgspec.Struct, frozen=True, gc=False, tag="gone"):
    """That start of ``pipeline`` is no longer in the run, and none of its processes may come back."""

    pipeline: int
    incarnation: int
    reason: str
    was_member: bool
    left: bool = False


class Denied(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag="denied"):
    """The request of the worker cannot be carried out. Where the process was declared lost, or its pipeline was, the
    process ``must_end``."""

    worker: Worker
    incarnation: int
    reason: str
    must_end: bool = False


class Held(msgspec.Struct, frozen=True, gc=False, tag="held"):
    """No pipeline trains until there are enough again; an empty ``reason`` says that there are."""

    reason: str


class RunOver(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag="run_over"):
    """The run has ``failed``, through ``worker`` if one caused it, or else all have finished."""

    reason: str
    failed: bool
    worker: Worker | None = None


MemberDecision: TypeAlias = Started | Receive | Donate | Abandoned | Met | Gone | Denied | Held | RunOver | Epoch
