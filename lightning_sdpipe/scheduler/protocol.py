"""Messages between a worker and the scheduler: typed, versioned, bounded in size.

A frame is one byte of protocol version followed by one msgpack-encoded struct; the struct's tag names its type. This
framing is the same in all versions, so each side can name the version that the other one speaks. Workers speak in
:data:`Request`, the scheduler in :data:`Reply`. A worker has two sockets: one for the thread that trains, and one for
the thread that sends heartbeats. Every request names its worker, the ``incarnation`` of the worker's job (drawn at
random when the job starts) and a ``number`` that grows with every request over both sockets, so that a repeated or
replayed frame can be told from a new one.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from lightning_sdpipe.dealing.leases import Done, Lease, Segment
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Count, Last, Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.scheduler.rows import About, Doing, NewRows

VERSION = 11
MAX_REQUEST_BYTES = 1 << 20
"""Requests are tens of bytes, but one that resumes a run carries its members, and the batches that were dealt."""
MAX_REPLY_BYTES = 1 << 22
MAX_REASON_CHARACTERS = 800


class MalformedFrame(ValueError):
    """A frame that is not a message of this protocol: too long, or not what the types allow."""


class WrongVersion(MalformedFrame):
    """A frame of another version of this protocol, or of none."""

    def __init__(self, version: int) -> None:
        super().__init__(f"it speaks version {version} of the protocol, this side version {VERSION}")
        self.version = version


class Answer(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="answer"):
    """A group and, in the order of its members, the iterations whose ready it answers (None for a passive member) and
    how often each member had been invited before (empty if none had). In an elastic run, ``life`` is that of the
    scheduler, as in :class:`~lightning_sdpipe.scheduler.membership_protocol.Stranger`."""

    group: Group
    iterations: tuple[Count | None, ...]
    invitations: tuple[Count, ...] = ()
    life: int = -1


def iteration_of(worker: Worker, answer: Answer) -> int | None:
    """Return the iteration of the ready by ``worker``, or by another worker of its pipeline, that ``answer`` answers;
    None if there is none."""
    answered = zip(answer.group.members, answer.iterations, strict=False)
    return next((iteration for member, iteration in answered if member.pipeline == worker.pipeline), None)


def invitations_of(worker: Worker, answer: Answer) -> int:
    """Return how many groups ``worker`` had been invited to before ``answer``."""
    invited = zip(answer.group.members, answer.invitations, strict=False)
    return next((count for member, count in invited if member.pipeline == worker.pipeline), 0)


Shape: TypeAlias = Annotated[tuple[Count, ...], msgspec.Meta(min_length=2)]
"""The stages and pipelines of a run; and the stages of each pipeline, where these are cut differently."""


class TrainingRequest(e.FromWorker, frozen=True, gc=False):
    """A request of the thread that trains; the heartbeat thread repeats it only to a restarted scheduler."""


class Hello(TrainingRequest, frozen=True, gc=False, tag="hello"):
    """Asks whether this is the scheduler of a run of shape ``mesh``; None checks nothing."""

    mesh: Shape | None


class Join(TrainingRequest, frozen=True, gc=False, tag="join"):
    """The worker takes part from now on; ``about`` describes it to people."""

    mesh: Shape | None
    about: About | None = None


class Ready(TrainingRequest, frozen=True, gc=False, tag="ready"):
    """The worker needs no other worker to finish the local step of ``iteration``, and waits for a group. What its model
    ``contains``, and whether it says so ``again``, are as in :class:`~lightning_sdpipe.policies.events.Ready`."""

    iteration: Count
    contains: Count | None = None
    again: bool = False


class Leave(TrainingRequest, frozen=True, gc=False, tag="leave"):
    """The worker pauses or has finished its epoch; ``rows`` are those that no heartbeat has carried, and what its model
    ``contains`` is as in a :class:`~lightning_sdpipe.scheduler.membership_protocol.Beat`."""

    rows: NewRows | None = None
    contains: Last = -1


class AskLease(TrainingRequest, frozen=True, gc=False, tag="ask_lease"):
    """Asks for the lease of the worker's pipeline that follows its ``ordinal`` earlier ones."""

    segment: Segment
    ordinal: Count
    done: Done


class Ask(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="ask"):
    """Asks ``what`` is known of the run; any program that may connect may ask. Chunks of rows come from number
    ``count`` on, or that many of the newest if it is negative; spans are those of each worker's newest ``count``
    updates, and come when all workers have told theirs, or some seconds later."""

    what: Literal["status", "rows", "spans"]
    count: int = 0


class Welcome(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="welcome"):
    """Confirms that the scheduler serves the shape that :class:`Hello` named. ``policy`` holds the policy's values as
    JSON, ``mesh`` the shape of the run."""

    number: int
    policy: str
    mesh: Shape


class Invitation(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="invitation"):
    """Take part in ``group`` as a passive member. When it was decided, the worker's last answered ready since it joined
    was that of iteration ``after``; None if there was none."""

    group: Group
    after: int | None = None


class Dealt(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="dealt"):
    """The answer to the :class:`AskLease` of that ``number``, sent when the lease is decided."""

    lease: Lease
    number: Count


class StatusReply(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="status"):
    """The state of the run."""

    status: Status


class RowsReply(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="rows"):
    """Chunks from number ``first`` on, each a :class:`~lightning_sdpipe.scheduler.rows.Chunk` in msgpack. ``next`` is
    the number to ask for next, ``now`` the time of the scheduler's clock, and ``workers`` those that have described
    themselves; ``doing`` is what present workers do."""

    now: float
    workers: tuple[tuple[Worker, About], ...]
    first: int
    next: int
    chunks: tuple[bytes, ...]
    doing: tuple[tuple[Worker, Doing], ...] = ()


class SpansReply(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="spans"):
    """Each of ``chunks`` is a :class:`~lightning_sdpipe.scheduler.rows.SpanChunk` in msgpack. Workers that are
    ``missing`` did not tell theirs in time; the reply had no room for those of ``left_out``."""

    workers: tuple[tuple[Worker, About], ...]
    chunks: tuple[bytes, ...]
    missing: tuple[Worker, ...]
    left_out: tuple[Worker, ...]


Request: TypeAlias = Hello | Join | Ready | Leave | AskLease
Reply: TypeAlias = Welcome | Answer | Invitation | Dealt | StatusReply | RowsReply | SpansReply

_PREFIX = bytes([VERSION])
_Message = TypeVar("_Message")
_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request | Ask | e.Request] = msgspec.msgpack.Decoder(
    Request | Ask | e.Request
)
_reply_decoder: msgspec.msgpack.Decoder[Reply | e.Reply] = msgspec.msgpack.Decoder(Reply | e.Reply)


def encode(message: Request | Ask | Reply | e.Request | e.Reply) -> bytes:
    """Return the frame of ``message``."""
    return _PREFIX + _encoder.encode(message)


def decode_request(frame: bytes) -> Request | Ask | e.Request:
    """Return the message of a frame that a worker or a command has sent; the inverse of :func:`encode`."""
    return _decode(frame, MAX_REQUEST_BYTES, _request_decoder)


def decode_reply(frame: bytes) -> Reply | e.Reply:
    """Return the message of a frame that the scheduler has sent; the inverse of :func:`encode`."""
    return _decode(frame, MAX_REPLY_BYTES, _reply_decoder)


def _decode(frame: bytes, limit: int, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
    if not 0 < len(frame) <= limit:
        raise MalformedFrame(f"{len(frame)} bytes where 1 to {limit} are allowed")
    if frame[0] != VERSION:
        raise WrongVersion(frame[0])
    try:
        return decoder.decode(frame[1:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedFrame(str(error)) from error


def routing_id(worker: Worker, incarnation: int) -> bytes:
    """Return the ZeroMQ identity of the socket of the thread that trains. Each start of the worker's job has its own,
    since the socket of the start before may still be connected."""
    return b"%d.%d.%x" % (worker.stage, worker.pipeline, incarnation)
