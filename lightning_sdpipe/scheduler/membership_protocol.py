"""What travels between a worker's process and the scheduler about the members of the run, and what each believes.

Requests carry the incarnation of the worker's job, and a number that grows. Every one may be repeated: it is answered
again, or changes nothing. Replies without a number are sent unasked, or answer what is decided later; these name what
they belong to. All travel in the frames of :mod:`lightning_sdpipe.scheduler.protocol`.

:class:`Beat` and :class:`Now` are levels: what a worker believes, and what is true for it. They are said when something
changes, and again when the other side has not heard, so it does not matter that one is lost or overtaken.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from lightning_sdpipe.dealing.leases import Done, Lease, Segment
from lightning_sdpipe.membership.members import Epoch, Exchanging, Met, Receive
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Count, Last, Worker
from lightning_sdpipe.scheduler.rows import About, NewRows, Spans

Amount: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]


class FromWorker(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Of a worker of the start ``incarnation`` of its pipeline's job."""

    worker: Worker
    incarnation: Count
    number: Count


class MemberRequest(FromWorker, frozen=True, gc=False):
    """Said by the thread that beats, and not by the one that trains."""


class Answer(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="answer"):
    """A group and, in the order of its members, the iterations whose ready it answers (passive: None), and how often
    each was invited before; empty if none was."""

    group: Group
    iterations: tuple[Count | None, ...]
    invitations: tuple[Count, ...] = ()


class Book(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All leases in ``segment`` that a worker heard of; ``over`` if it heard that too."""

    segment: Segment
    leases: tuple[Lease, ...]
    over: bool
    done: Done


class Resumes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a worker knows of a run that it takes part in, for all it knows.

    ``holds`` are epochs that it has a process group of. ``regrouped`` are broken groups, and those in which it was to
    try them again, of which another member may not have heard; ``heard`` is the highest number of a group that it heard
    of, -1 if of none. ``book`` is what it was dealt, if anything was. If it has ``joined``, then ``answered`` is the
    iteration whose group it has heard of last, and ``answers`` are those that another member could still ask for.
    ``about`` is for people. For the rest see :class:`~lightning_sdpipe.membership.members.Resumed`.
    """

    epoch: Epoch
    holds: tuple[Count, ...]
    met: tuple[Met, ...] = ()
    since: Count = 0
    regrouped: tuple[tuple[Count, Group], ...] = ()
    heard: Last = -1
    book: Book | None = None
    joined: bool = False
    answered: Count | None = None
    answers: tuple[Answer, ...] = ()
    about: About | None = None


class Enrol(MemberRequest, frozen=True, gc=False, tag="enrol"):
    """The worker wants to take part, or takes part and ``resumes``."""

    fingerprint: dict[str, str]
    resumes: Resumes | None = None


class Beat(MemberRequest, frozen=True, gc=False, tag="beat"):
    """The worker lives, and believes this. ``epoch`` is the newest that it heard of (0: none); ``enrolled`` says that
    it wants to take part, and ``seen`` is the version of the newest :class:`Now` that it heard (0: none). It is in
    ``exchange``, if any; those of groups and of meetings that it left last are numbered ``left``. In ``epoch`` it
    cannot reach the pipelines ``misses``. It has made ``update`` updates (-1: it does not say). ``joined`` says whether
    it believes that it takes part in groups, ``rows`` what it did since the last beat, and ``dealt`` how far it is with
    what was dealt. ``spans`` are there when the scheduler has wanted them."""

    holds: tuple[Count, ...]
    epoch: Count
    enrolled: bool
    seen: Count = 0
    exchange: Exchanging | None = None
    left: tuple[Last, Last] = (-1, -1)
    misses: tuple[Count, ...] = ()
    update: Last = -1
    joined: bool = False
    rows: NewRows | None = None
    dealt: tuple[Segment, Done] | None = None
    spans: Spans | None = None


class TellSnapshot(MemberRequest, frozen=True, gc=False, tag="snapshot"):
    """See :class:`~lightning_sdpipe.membership.members.Snapshot`."""

    transfer: str
    update: Count


class TellReceived(MemberRequest, frozen=True, gc=False, tag="received"):
    """The worker has the state of ``transfer``, that after ``update`` updates; or it was ``missed``, and why."""

    transfer: str
    update: Last
    missed: str = ""


class Meet(MemberRequest, frozen=True, gc=False, tag="meet"):
    """The worker is at ``key``, and waits."""

    key: str
    value: bytes


class AskRegroup(MemberRequest, frozen=True, gc=False, tag="regroup"):
    """The worker did not get the result of ``group``; ``together``: all members take it over, or none (gradients)."""

    group: Group
    holds: tuple[Count, ...]
    together: bool


class TellCompleted(MemberRequest, frozen=True, gc=False, tag="completed"):
    """The worker has the result of the group ``sequence``."""

    sequence: Count


class Publish(MemberRequest, frozen=True, gc=False, tag="publish"):
    """The worker wants to put a checkpoint, of the state after ``update`` updates, at ``path``, or has ``done`` so."""

    path: str
    update: Last
    done: bool


class Depart(MemberRequest, frozen=True, gc=False, tag="depart"):
    """The worker ends: ``failed`` says by which exception; else it has ``finished``, or was told to."""

    finished: bool
    failed: str = ""


class Store(MemberRequest, frozen=True, gc=False, tag="store"):
    """To the key-value store: ``put`` the ``value`` at the key; ``fetch`` the values of all ``keys``, as they are, or
    ``wait`` until all are there; ``add`` the ``amount`` to the number at the key, 0 at first; ``remove`` the key."""

    verb: Literal["put", "fetch", "wait", "add", "remove"]
    keys: tuple[str, ...]
    value: bytes = b""
    amount: Amount = 0


# ----------------------------------------------------------------------------------------------------- replies


class MemberReply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the scheduler says."""


class Noted(MemberReply, frozen=True, gc=False, tag="noted"):
    """The request ``number`` was carried out; so far the worker was invited ``invitations`` times. In answer to a
    beat, the scheduler ``wants`` the spans of so many updates, of those that had ended at a time of its clock, which
    shows another time now."""

    number: int
    invitations: int = 0
    wants: tuple[Count, float, float] | None = None


class Waits(MemberReply, frozen=True, gc=False, tag="waits"):
    """What request ``number`` asks for is still to come; ``reason`` says what is missing."""

    number: int
    reason: str


class Line(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Connect to ``port`` of the scheduler's machine (0: it has none), say ``nonce``, and keep that connection; beat
    every ``beat`` seconds. A transfer that has not moved for ``limit`` seconds is given up."""

    port: int
    nonce: bytes
    beat: float
    limit: float


class End(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All processes of the worker's pipeline must end; or the ``run`` is over: it has ``failed``, through ``worker`` if
    that is one's, or all have finished."""

    reason: str
    run: bool
    failed: bool = True
    worker: Worker | None = None


LIFE = 20
"""Bits of a version that count; those above are drawn by each scheduler."""


class Now(MemberReply, frozen=True, gc=False, tag="now"):
    """What is true for the worker's process, by ``version``, of which an older one, or one of an earlier scheduler,
    says nothing; but an ``over`` holds in any version. An ``epoch`` counts by its own number; it and the ``line`` are
    left out where the worker knows them.

    While there is a reason to ``hold``, no pipeline begins a turn: there are too few pipelines. What was begun goes
    on, and is answered, since a worker within a turn cannot give its state to those that are to come. (None: that is
    not decided yet.) Stage 0 still has to have the state copied for the transfers ``donate``. Of the groups ``broken``
    another member did not get the result, and this worker has not said whether it has. The workers ``lost`` are silent,
    for these reasons, and the others go on without them.
    """

    version: int
    line: Line | None = None
    epoch: Epoch | None = None
    hold: str | None = None
    donate: tuple[str, ...] = ()
    broken: tuple[int, ...] = ()
    lost: tuple[tuple[Worker, str], ...] = ()
    over: End | None = None


class Start(MemberReply, frozen=True, gc=False, tag="start"):
    """See :class:`~lightning_sdpipe.membership.members.Started`."""

    epoch: Epoch
    fresh: bool
    checkpoint: str = ""


class Get(MemberReply, frozen=True, gc=False, tag="get"):
    """The worker's pipeline gets its state from another one."""

    receive: Receive


class HasMet(MemberReply, frozen=True, gc=False, tag="met"):
    """The answer to a :class:`Meet`."""

    met: Met


class Again(MemberReply, frozen=True, gc=False, tag="again"):
    """Try the group ``sequence`` again in ``group``. Or, with a ``source``, do not: that pipeline has its result, and
    gives it to the other members of ``group`` in the process group of its epoch; the source is told the same."""

    sequence: int
    group: Group
    source: int = -1


class Stored(MemberReply, frozen=True, gc=False, tag="stored"):
    """Answers a :class:`Store`: the values of its keys, None for one that is not there; or the number at its key, of an
    ``add`` the sum, and of a ``remove`` how many there were."""

    number: int
    values: tuple[bytes | None, ...] = ()
    count: int = 0


class Refused(MemberReply, frozen=True, gc=False, tag="refused"):
    """The request ``number`` changed nothing, since what it asks for cannot be; 0: whatever the worker waits for from
    the others."""

    number: int
    reason: str


class Stranger(MemberReply, frozen=True, gc=False, tag="stranger"):
    """The scheduler does not know the process, or, if that is ``known``, not that it takes part in groups (it may have
    been restarted): enrol again, with what is known."""

    known: bool = False


Request: TypeAlias = (
    Enrol | Beat | TellSnapshot | TellReceived | Meet | AskRegroup | TellCompleted | Publish | Depart | Store
)
Reply: TypeAlias = Noted | Now | Waits | Start | Get | HasMet | Again | Stored | Refused | Stranger


def must_end(reason: str) -> Now:
    """To a process whose pipeline is not in the run any more."""
    return Now(0, over=End(reason, run=False))


def peer_of(worker: Worker, incarnation: int) -> bytes:
    """The ZeroMQ identity of the socket on which a worker's process beats."""
    return b"%d.%d.member.%x" % (worker.stage, worker.pipeline, incarnation)
