"""Messages between a worker's process and the scheduler about the members of the run, and what each side believes.

Requests carry the incarnation of the worker's job, and a number that grows. Every request may be repeated: it is
answered again, or changes nothing. Replies without a number are sent unasked, or answer what is decided later; these
name what they belong to. All travel in the frames of :mod:`lightning_sdpipe.scheduler.protocol`.

:class:`Beat` and :class:`Now` carry levels: what a worker believes, and what is true for it. They are sent when
something changes, and again until the other side has heard, so losing or reordering them does no harm.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from lightning_sdpipe.dealing.leases import Book, Done, Segment
from lightning_sdpipe.membership.members import Epoch, Exchanging, Met, Receive
from lightning_sdpipe.policies.events import Count, Last, Worker
from lightning_sdpipe.scheduler.rows import About, Doing, NewRows, Spans

Amount: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]


class FromWorker(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A message of a worker in the start ``incarnation`` of its pipeline's job."""

    worker: Worker
    incarnation: Count
    number: Count


class MemberRequest(FromWorker, frozen=True, gc=False):
    """A request of the heartbeat thread, never of the thread that trains."""


class Resumes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a worker knows of the elastic run in which it already takes part.

    ``holds`` are the epochs whose process groups it holds. ``heard`` is the highest sequence of a group that it heard
    of, -1 if of none. ``book`` has the batches that it was dealt, if any. If it has ``joined``, as far as it knows,
    ``answered`` is the iteration of the newest group that it heard of. ``about`` describes it to people, and
    ``contains`` is as in a :class:`Beat`. For the other fields see
    :class:`~lightning_sdpipe.membership.members.Resumed`.
    """

    epoch: Epoch
    holds: tuple[Count, ...]
    met: tuple[Met, ...] = ()
    heard: Last = -1
    book: Book | None = None
    joined: bool = False
    answered: Count | None = None
    about: About | None = None
    contains: Last = -1


class Enrol(MemberRequest, frozen=True, gc=False, tag="enrol"):
    """The worker wants to take part, and ``heard_of`` is the newest epoch that it heard of, if any; or it takes part
    already and ``resumes``."""

    fingerprint: dict[str, str]
    resumes: Resumes | None = None
    heard_of: Epoch | None = None


class Beat(MemberRequest, frozen=True, gc=False, tag="beat"):
    """The worker lives, and believes what the fields say. ``epoch`` is the newest that it heard of (0: none);
    ``enrolled`` says that it wants to take part, and ``seen`` is the version of the newest :class:`Now` that it heard
    (0: none). It is in ``exchange``, if any; ``left`` numbers the exchanges of groups and of barriers that it left
    last. In ``epoch`` it cannot reach the pipelines ``misses``. It has made ``update`` updates (-1: unknown).
    ``joined`` says whether it believes that it takes part in groups, ``rows`` what it did since the last beat, and
    ``dealt`` how far it is with the batches that it was dealt. ``spans`` are there when the scheduler has asked for
    them. Its model ``contains`` the outcomes of that many rounds (-1: not counted). If no byte has come or gone for as
    long as a worker may be silent, the first string of ``awaits`` says what it waits for; the others are addresses that
    acknowledge nothing. ``doing`` is for people."""

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
    awaits: tuple[str, ...] = ()
    doing: Doing | None = None
    contains: Last = -1


class TellSnapshot(MemberRequest, frozen=True, gc=False, tag="snapshot"):
    """The worker has copied its state; see :class:`~lightning_sdpipe.membership.members.Snapshot`."""

    transfer: str
    update: Count


class TellReceived(MemberRequest, frozen=True, gc=False, tag="received"):
    """The worker has the state of ``transfer`` after ``update`` updates; or ``missed`` says why it does not."""

    transfer: str
    update: Last
    missed: str = ""


class Meet(MemberRequest, frozen=True, gc=False, tag="meet"):
    """The worker waits at the barrier ``key``."""

    key: str
    value: bytes


class Publish(MemberRequest, frozen=True, gc=False, tag="publish"):
    """The worker asks to put a checkpoint of the state after ``update`` updates at ``path``, or has ``done`` so."""

    path: str
    update: Last
    done: bool


class Depart(MemberRequest, frozen=True, gc=False, tag="depart"):
    """The process ends: ``failed`` names its exception; without one it has ``finished``, or was told to end."""

    finished: bool
    failed: str = ""


class Store(MemberRequest, frozen=True, gc=False, tag="store"):
    """A request to the key-value store: ``put`` the ``value`` at the key; ``fetch`` the present values of all ``keys``,
    or ``wait`` until all have one; ``add`` the ``amount`` to the number at the key, 0 at first; ``remove`` the key."""

    verb: Literal["put", "fetch", "wait", "add", "remove"]
    keys: tuple[str, ...]
    value: bytes = b""
    amount: Amount = 0


# ----------------------------------------------------------------------------------------------------- replies


class MemberReply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message of the scheduler."""


class Noted(MemberReply, frozen=True, gc=False, tag="noted"):
    """The request ``number`` was carried out; so far the worker was invited ``invitations`` times. In answer to a beat,
    ``wants`` asks for spans: the number of updates, the time of the scheduler's clock by which they had ended, and its
    time now."""

    number: int
    invitations: int = 0
    wants: tuple[Count, float, float] | None = None


class Waits(MemberReply, frozen=True, gc=False, tag="waits"):
    """The answer to request ``number`` is still to come; ``reason`` says what is missing. A newcomer hears of the
    ``epoch`` that it is to join."""

    number: int
    reason: str
    epoch: Epoch | None = None


class Line(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The lifeline: connect to ``port`` of the scheduler's machine (0: it has none), say ``nonce``, and keep that
    connection; beat every ``beat`` seconds. A transfer that has not moved for ``limit`` seconds is given up."""

    port: int
    nonce: bytes
    beat: float
    limit: float


class End(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All processes of the worker's pipeline must end; or the ``run`` is over: it has ``failed``, through ``worker``
    (None: the scheduler itself), or all have finished."""

    reason: str
    run: bool
    failed: bool = True
    worker: Worker | None = None

    def __str__(self) -> str:
        """Return what people are told of a run that has failed."""
        source = "the scheduler" if self.worker is None else f"worker {self.worker}"
        return f"{source} failed first: {self.reason}"


LIFE = 20
"""Number of a version's low bits, which count up; each scheduler draws the bits above."""


class Now(MemberReply, frozen=True, gc=False, tag="now"):
    """The truth about the worker's process, as of ``version``. An older version, or one of an earlier scheduler, is
    ignored; but an ``over`` holds in any version. An ``epoch`` counts by its own number; it and the ``line`` are left
    out where the worker knows them.

    While ``hold`` gives a reason (too few pipelines), no pipeline begins a turn. A turn that has begun goes on and is
    answered, since a worker within a turn cannot give its state to newcomers. None: not decided yet. Stage 0 still has
    to have the state copied for the transfers ``donate``. The exchanges of the groups ``stuck`` are broken off, and the
    worker has not left them.
    """

    version: int
    line: Line | None = None
    epoch: Epoch | None = None
    hold: str | None = None
    donate: tuple[str, ...] = ()
    stuck: tuple[int, ...] = ()
    over: End | None = None


class Start(MemberReply, frozen=True, gc=False, tag="start"):
    """The worker's pipeline may begin; see :class:`~lightning_sdpipe.membership.members.Started`."""

    epoch: Epoch
    fresh: bool
    checkpoint: str = ""


class Get(MemberReply, frozen=True, gc=False, tag="get"):
    """The worker's pipeline gets its state from another one."""

    receive: Receive


class HasMet(MemberReply, frozen=True, gc=False, tag="met"):
    """The answer to a :class:`Meet`."""

    met: Met


class Stored(MemberReply, frozen=True, gc=False, tag="stored"):
    """Answers a :class:`Store`: the values of its keys, None where there is none; ``count`` is the number at the key
    after an ``add``, or how many keys a ``remove`` took away."""

    number: int
    values: tuple[bytes | None, ...] = ()
    count: int = 0


class Refused(MemberReply, frozen=True, gc=False, tag="refused"):
    """The request ``number`` changed nothing, since it cannot be carried out; 0 refuses all that the worker waits for
    from others."""

    number: int
    reason: str


class Stranger(MemberReply, frozen=True, gc=False, tag="stranger"):
    """The scheduler does not know the process; or it is ``known``, but not as taking part in groups (the scheduler may
    have restarted). The process must enrol again, with what it knows. ``life`` is this scheduler's: a process that has
    heard a :class:`Now` of that life is known to it by then."""

    known: bool = False
    life: int = -1


Request: TypeAlias = Enrol | Beat | TellSnapshot | TellReceived | Meet | Publish | Depart | Store
Reply: TypeAlias = Noted | Now | Waits | Start | Get | HasMet | Stored | Refused | Stranger


def must_end(reason: str) -> Now:
    """Return the message for a process whose pipeline is no longer in the run."""
    return Now(0, over=End(reason, run=False))


def peer_of(worker: Worker, incarnation: int) -> bytes:
    """Return the ZeroMQ identity of the socket for a process's heartbeats."""
    return b"%d.%d.member.%x" % (worker.stage, worker.pipeline, incarnation)
