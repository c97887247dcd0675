"""What travels between a worker of an elastic run and the scheduler, besides what it says in any run.

Requests carry the incarnation of the worker's job instead of a session, and a number that grows. Every one may be
repeated: it is answered again, or changes nothing. Replies without a number are sent unasked, or answer what is decided
later; these name what they belong to. All travel in the frames of :mod:`lightning_sdpipe.scheduler.protocol`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from lightning_sdpipe.membership.members import Donate, Epoch, Exchanging, Met, Receive
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Count, Last, Worker

Amount: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]


class ElasticRequest(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Of a worker of the start ``incarnation`` of its pipeline's job."""

    worker: Worker
    incarnation: Count
    number: Count


class Enrol(ElasticRequest, frozen=True, gc=False, tag="enrol"):
    """The worker wants to take part."""

    fingerprint: dict[str, str]


class Resume(ElasticRequest, frozen=True, gc=False, tag="resume"):
    """The worker takes part, for all it knows; ``holds`` are epochs that it has a process group of. ``regrouped`` are
    broken groups, and those in which it was to try them again, of which another member may not have heard. For the rest
    see :class:`~lightning_sdpipe.membership.members.Resumed`."""

    fingerprint: dict[str, str]
    epoch: Epoch
    holds: tuple[Count, ...]
    met: tuple[Met, ...]
    since: Count = 0
    regrouped: tuple[tuple[Count, Group], ...] = ()


class Beat(ElasticRequest, frozen=True, gc=False, tag="beat"):
    """The worker lives. ``epoch`` is the newest that it heard of (0: none); ``enrolled`` says that it wants to take
    part, and ``held`` that it begins no turn, since it was told so. It is in ``exchange``, if any; those of groups and
    of meetings that it left last are numbered ``left``. In ``epoch`` it cannot reach the pipelines ``misses``.
    It has made ``update`` updates (-1: it does not say)."""

    holds: tuple[Count, ...]
    epoch: Count
    enrolled: bool
    held: bool = False
    exchange: Exchanging | None = None
    left: tuple[Last, Last] = (-1, -1)
    misses: tuple[Count, ...] = ()
    update: Last = -1


class TellSnapshot(ElasticRequest, frozen=True, gc=False, tag="snapshot"):
    """See :class:`~lightning_sdpipe.membership.members.Snapshot`."""

    transfer: str
    update: Count


class TellReceived(ElasticRequest, frozen=True, gc=False, tag="received"):
    """The worker has the state of ``transfer``, that after ``update`` updates; or it was ``missed``, and why."""

    transfer: str
    update: Last
    missed: str = ""


class Meet(ElasticRequest, frozen=True, gc=False, tag="meet"):
    """The worker is at ``key``, and waits."""

    key: str
    value: bytes


class AskRegroup(ElasticRequest, frozen=True, gc=False, tag="regroup"):
    """The worker did not get the result of ``group``; ``together``: all members take it over, or none (gradients)."""

    group: Group
    holds: tuple[Count, ...]
    together: bool


class TellCompleted(ElasticRequest, frozen=True, gc=False, tag="completed"):
    """The worker has the result of the group ``sequence``."""

    sequence: Count


class Publish(ElasticRequest, frozen=True, gc=False, tag="publish"):
    """The worker wants to put a checkpoint, of the state after ``update`` updates, at ``path``, or has ``done`` so."""

    path: str
    update: Last
    done: bool


class Depart(ElasticRequest, frozen=True, gc=False, tag="depart"):
    """The worker ends: ``failed`` says by which exception; else it has ``finished``, or was told to."""

    finished: bool
    failed: str = ""


class Put(ElasticRequest, frozen=True, gc=False, tag="put"):
    """Sets ``key``."""

    key: str
    value: bytes


class Fetch(ElasticRequest, frozen=True, gc=False, tag="fetch"):
    """The values of ``keys``: when all are there if it ``waits``, else as they are now."""

    keys: tuple[str, ...]
    waits: bool


class Add(ElasticRequest, frozen=True, gc=False, tag="add"):
    """Adds to the number at ``key``, which is 0 at first."""

    key: str
    amount: Amount


class Remove(ElasticRequest, frozen=True, gc=False, tag="remove"):
    """Forgets ``key``."""

    key: str


# ----------------------------------------------------------------------------------------------------- replies


class ElasticReply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the scheduler says."""


class Noted(ElasticReply, frozen=True, gc=False, tag="noted"):
    """The request ``number`` was heard."""

    number: int


class Waits(ElasticReply, frozen=True, gc=False, tag="waits"):
    """What request ``number`` asks for is still to come; ``reason`` says what is missing."""

    number: int
    reason: str


class Line(ElasticReply, frozen=True, gc=False, tag="line"):
    """Connect to ``port`` of the scheduler's machine (0: it has none), say ``nonce``, and keep that connection; beat
    every ``beat`` seconds. A transfer that has not moved for ``limit`` seconds is given up. (An ordinary run has its
    own.) Say ``b"."`` before you close it, unless the process ends."""

    port: int
    nonce: bytes
    beat: float = 0.0
    limit: float = 0.0


class Start(ElasticReply, frozen=True, gc=False, tag="start"):
    """See :class:`~lightning_sdpipe.membership.members.Started`."""

    epoch: Epoch
    fresh: bool
    checkpoint: str = ""


class Get(ElasticReply, frozen=True, gc=False, tag="get"):
    """The worker's pipeline gets its state from another one."""

    receive: Receive


class Give(ElasticReply, frozen=True, gc=False, tag="give"):
    """The worker's pipeline gives its state to another one: said to its stage 0."""

    donate: Donate


class Drop(ElasticReply, frozen=True, gc=False, tag="drop"):
    """Nobody waits for ``transfer`` any more."""

    transfer: str


class NewEpoch(ElasticReply, frozen=True, gc=False, tag="new_epoch"):
    """The members have changed."""

    epoch: Epoch


class Hold(ElasticReply, frozen=True, gc=False, tag="hold"):
    """Nobody begins another turn while there is a ``reason``: there are too few pipelines. What was begun goes on, and
    is answered, since a worker within a turn cannot give its state to those that are to come."""

    reason: str


class HasMet(ElasticReply, frozen=True, gc=False, tag="met"):
    """The answer to a :class:`Meet`."""

    met: Met


class Broke(ElasticReply, frozen=True, gc=False, tag="broke"):
    """A member did not get the result of the group ``sequence``: who has it, says so; who waits for it, need not."""

    sequence: int


class Regroup(ElasticReply, frozen=True, gc=False, tag="group_again"):
    """Try it again in ``group``, instead of ``sequence``."""

    sequence: int
    group: Group


class Skip(ElasticReply, frozen=True, gc=False, tag="skip"):
    """Do not try the group ``sequence`` again: ``source``, a pipeline, has its result, and gives its state."""

    sequence: int
    source: int


class Values(ElasticReply, frozen=True, gc=False, tag="values"):
    """Answers a :class:`Fetch`; None for a key that is not there."""

    number: int
    values: tuple[bytes | None, ...]


class Sum(ElasticReply, frozen=True, gc=False, tag="sum"):
    """Answers an :class:`Add` (the sum) and a :class:`Remove` (how many there were)."""

    number: int
    value: int


class Denial(ElasticReply, frozen=True, gc=False, tag="denial"):
    """What the worker asked for in request ``number`` cannot be; 0: whatever it waits for from the others."""

    reason: str
    number: int = 0


class MustEnd(ElasticReply, frozen=True, gc=False, tag="must_end"):
    """The worker's pipeline is not in the run any more; all of its processes must end."""

    reason: str


class Over(ElasticReply, frozen=True, gc=False, tag="over"):
    """The run is over: it has ``failed``, or all have finished."""

    reason: str
    failed: bool


class Stranger(ElasticReply, frozen=True, gc=False, tag="stranger"):
    """The scheduler does not know the worker (it may have been restarted): enrol, or resume."""


Request: TypeAlias = (
    Enrol
    | Resume
    | Beat
    | TellSnapshot
    | TellReceived
    | Meet
    | AskRegroup
    | TellCompleted
    | Publish
    | Depart
    | Put
    | Fetch
    | Add
    | Remove
)
Reply: TypeAlias = (
    Noted
    | Waits
    | Line
    | Start
    | Get
    | Give
    | Drop
    | NewEpoch
    | Hold
    | HasMet
    | Broke
    | Regroup
    | Skip
    | Values
    | Sum
    | Denial
    | MustEnd
    | Over
    | Stranger
)


def peer_of(worker: Worker, incarnation: int) -> bytes:
    """The ZeroMQ identity of the socket on which a worker's process speaks of membership."""
    return b"%d.%d.member.%x" % (worker.stage, worker.pipeline, incarnation)
