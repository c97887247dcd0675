"""What travels between a worker and the scheduler: typed, versioned, bounded in size.

A frame is one byte of protocol version followed by one msgpack-encoded struct; the struct's tag says which. That much
holds for all versions, so that either side can say which one the other speaks. Workers speak in :data:`Request`, the
scheduler in :data:`Reply`. A worker has two sockets: the one that its training uses, and one for the heartbeats of a
thread. Every request names its worker, the ``incarnation`` of the worker's job (drawn at random when that starts) and a
``number`` that grows with every request over both sockets, so that a repeated or replayed frame can be told from a new
one.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from lightning_sdpipe.dealing.leases import Done, Lease, Segment
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Count, Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.scheduler.rows import MOST_UPDATES, About, NewRows

VERSION = 5
MAX_REQUEST_BYTES = 1 << 20
"""Requests are tens of bytes, but one that resumes a run carries groups of up to thousands of members."""
MAX_REPLY_BYTES = 1 << 22
MAX_REASON_CHARACTERS = 800


class MalformedFrame(ValueError):
    """Not a message of this protocol: too long, or not what the types allow."""


class WrongVersion(MalformedFrame):
    """A frame of another version of this protocol, or of none."""

    def __init__(self, version: int) -> None:
        super().__init__(f"it speaks version {version} of the protocol, this side version {VERSION}")
        self.version = version


Answer: TypeAlias = e.Answer


def iteration_of(worker: Worker, answer: Answer) -> int | None:
    """Which ready of ``worker``, or of its whole pipeline, it answers."""
    for member, iteration in zip(answer.group.members, answer.iterations, strict=False):
        if member.pipeline == worker.pipeline:
            return iteration
    return None


def invitations_of(worker: Worker, answer: Answer) -> int:
    """How many groups ``worker`` had been invited to before it was answered so."""
    invited = zip(answer.group.members, answer.invitations, strict=False)
    return next((count for member, count in invited if member.pipeline == worker.pipeline), 0)


class Failure(msgspec.Struct, frozen=True):
    """The first failure of a run: of a worker, or of the scheduler itself (None)."""

    worker: Worker | None
    reason: str

    def __str__(self) -> str:
        who = "the scheduler" if self.worker is None else f"worker {self.worker}"
        return f"{who} failed first: {self.reason}"

    def said(self) -> e.Now:
        """To the workers."""
        return e.Now(0, over=e.End(self.reason, True, True, self.worker))


Shape: TypeAlias = Annotated[tuple[Count, ...], msgspec.Meta(min_length=2)]
"""The stages and pipelines of a run; and the stages of each pipeline, where these are cut unlike."""


class TrainingRequest(e.FromWorker, frozen=True, gc=False):
    """Said by the thread that trains; by the other one only to a scheduler that was started again."""


class Hello(TrainingRequest, frozen=True, gc=False, tag="hello"):
    """Is this the scheduler of a run of that shape? (Not checked without.)"""

    mesh: Shape | None


class Join(TrainingRequest, frozen=True, gc=False, tag="join"):
    """The worker takes part from now on; ``about`` is for people."""

    mesh: Shape | None
    about: About | None = None


class Ready(TrainingRequest, frozen=True, gc=False, tag="ready"):
    """The worker needs nobody any more to finish the local step of ``iteration``, and waits for a group."""

    iteration: Count


class Leave(TrainingRequest, frozen=True, gc=False, tag="leave"):
    """The worker pauses or has finished its epoch; ``rows`` are those that no beat has told."""

    rows: NewRows | None = None


class AskLease(TrainingRequest, frozen=True, gc=False, tag="ask_lease"):
    """Which batches does my pipeline train after those of its lease before ``ordinal``?"""

    segment: Segment
    ordinal: Count
    done: Done


class AskStatus(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="ask_status"):
    """How is the run? Anybody who may connect may ask."""


class AskRows(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="ask_rows"):
    """What did workers do? Chunks from number ``since`` on, or so many of the newest if it is negative. Anybody who may
    connect may ask."""

    since: int


class AskSpans(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="ask_spans"):
    """What did workers do in their newest ``updates``, span by span? The answer comes when all have told, or seconds
    later. Any program that may connect may ask."""

    updates: Annotated[int, msgspec.Meta(ge=1, le=MOST_UPDATES)]


class Welcome(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="welcome"):
    """The scheduler is the right one; ``policy`` are the values of what it decides by, as JSON, and ``mesh`` the shape
    of the run that it serves."""

    number: int
    policy: str
    mesh: Shape


class Invitation(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="invitation"):
    """Take part in ``group`` as a passive member. It was decided when the last ready of the worker that had been
    answered, since it joined, was that of iteration ``after``; None if there was none."""

    group: Group
    after: int | None = None


class Dealt(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="dealt"):
    """The answer to an :class:`AskLease`, when it is decided."""

    lease: Lease


class StatusReply(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="status"):
    """How the run is."""

    status: Status


class RowsReply(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="rows"):
    """Chunks from number ``first`` on, each a :class:`~lightning_sdpipe.scheduler.rows.Chunk` in msgpack; ``next`` is
    to be asked for next, and ``now`` the time of the scheduler's clock. ``workers`` have said who they are."""

    now: float
    workers: tuple[tuple[Worker, About], ...]
    first: int
    next: int
    chunks: tuple[bytes, ...]


class SpansReply(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="spans"):
    """Each of ``chunks`` is a :class:`~lightning_sdpipe.scheduler.rows.SpanChunk` in msgpack. Workers that are
    ``missing`` did not tell in time; those ``left_out`` did, and the reply had no room for them."""

    workers: tuple[tuple[Worker, About], ...]
    chunks: tuple[bytes, ...]
    missing: tuple[Worker, ...]
    left_out: tuple[Worker, ...]


Request: TypeAlias = Hello | Join | Ready | Leave | AskLease
Reply: TypeAlias = Welcome | Answer | Invitation | Dealt | StatusReply | RowsReply | SpansReply
Question: TypeAlias = AskStatus | AskRows | AskSpans
"""Of a program that is no worker."""

_PREFIX = bytes([VERSION])
_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request | Question | e.Request] = msgspec.msgpack.Decoder(
    Request | Question | e.Request
)
_reply_decoder: msgspec.msgpack.Decoder[Reply | e.Reply] = msgspec.msgpack.Decoder(Reply | e.Reply)


def encode(message: Request | Question | Reply | e.Request | e.Reply) -> bytes:
    """One frame."""
    return _PREFIX + _encoder.encode(message)


def decode_request(frame: bytes) -> Request | Question | e.Request:
    """The inverse of :func:`encode`, for the scheduler."""
    _check(frame, MAX_REQUEST_BYTES)
    try:
        return _request_decoder.decode(frame[1:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedFrame(str(error)) from error


def decode_reply(frame: bytes) -> Reply | e.Reply:
    """The inverse of :func:`encode`, for a worker."""
    _check(frame, MAX_REPLY_BYTES)
    try:
        return _reply_decoder.decode(frame[1:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedFrame(str(error)) from error


def _check(frame: bytes, limit: int) -> None:
    if len(frame) > limit:
        raise MalformedFrame(f"{len(frame)} bytes where at most {limit} are allowed")
    if not frame:
        raise MalformedFrame("no bytes")
    if frame[0] != VERSION:
        raise WrongVersion(frame[0])


def routing_id(worker: Worker, incarnation: int) -> bytes:
    """The ZeroMQ identity of the socket that the worker's training uses; each start of its job has its own, since the
    one before may still be connected."""
    return b"%d.%d.%x" % (worker.stage, worker.pipeline, incarnation)
