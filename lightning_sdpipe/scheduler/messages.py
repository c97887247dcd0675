"""What travels between a worker and the scheduler: typed, versioned, bounded in size.

A frame is one byte of protocol version followed by one msgpack-encoded struct; the struct's tag says which.
Workers speak in :data:`Request`, the scheduler in :data:`Reply`. Every request names its worker, the client's
``session`` (chosen at random when the client was made) and a ``number`` that grows with every request of the
session, so that a repeated or replayed frame can be told from a new one.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from lightning_sdpipe.scheduler.policy import Group, Worker

VERSION = 1
MAX_REQUEST_BYTES = 4096
"""A request is tens of bytes; a failure's reason is cut to :data:`MAX_REASON_CHARACTERS`."""
MAX_REPLY_BYTES = 1 << 20
MAX_REASON_CHARACTERS = 800


class MalformedFrame(ValueError):
    """Not a message of this protocol: wrong version, too long, or not what the types allow."""


class _Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    worker: Worker
    session: int
    number: int


class Join(_Request, frozen=True, tag="join"):
    """The worker takes part from now on."""


class Ready(_Request, frozen=True, tag="ready"):
    """The worker finished the local step of ``iteration`` and waits for a group."""

    iteration: int


class Leave(_Request, frozen=True, tag="leave"):
    """The worker pauses or has finished its epoch."""


class Failed(_Request, frozen=True, tag="failed"):
    """The worker failed; the run cannot go on."""

    reason: str


class AskFailure(_Request, frozen=True, tag="ask_failure"):
    """Did any worker fail?"""


class AskMissing(_Request, frozen=True, tag="ask_missing"):
    """Whom does my stage wait for?"""


class Failure(msgspec.Struct, frozen=True):
    """The first failure of a run."""

    worker: Worker
    reason: str


class Acknowledged(msgspec.Struct, frozen=True, array_like=True, tag="acknowledged"):
    """The request ``number`` was carried out."""

    number: int


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The group for the worker's ready of ``iteration``."""

    iteration: int
    group: Group


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The request ``number`` changed nothing; ``reason`` says why."""

    number: int
    reason: str


class Missing(msgspec.Struct, frozen=True, array_like=True, tag="missing"):
    """The active workers of the stage that are not ready."""

    number: int
    workers: tuple[Worker, ...]


class FirstFailure(msgspec.Struct, frozen=True, array_like=True, tag="first_failure"):
    """What failed first, if anything."""

    number: int
    failure: Failure | None


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """The run is over: ``failure`` came first."""

    failure: Failure


Request: TypeAlias = Join | Ready | Leave | Failed | AskFailure | AskMissing
Reply: TypeAlias = Acknowledged | Answer | Refused | Missing | FirstFailure | Abort

_PREFIX = bytes([VERSION])
_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """One frame."""
    return _PREFIX + _encoder.encode(message)


def decode_request(frame: bytes) -> Request:
    """The inverse of :func:`encode`, for the scheduler."""
    _check(frame, MAX_REQUEST_BYTES)
    try:
        return _request_decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedFrame(str(error)) from error


def decode_reply(frame: bytes) -> Reply:
    """The inverse of :func:`encode`, for a worker."""
    _check(frame, MAX_REPLY_BYTES)
    try:
        return _reply_decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedFrame(str(error)) from error


def _check(frame: bytes, limit: int) -> None:
    if len(frame) > limit:
        raise MalformedFrame(f"{len(frame)} bytes where at most {limit} are allowed")
    if not frame or frame[0] != VERSION:
        version = frame[0] if frame else "no"
        raise MalformedFrame(f"protocol version {version} where this side speaks version {VERSION}")


def routing_id(worker: Worker) -> bytes:
    """The ZeroMQ identity of the worker's one socket."""
    return b"%d.%d" % (worker.stage, worker.pipeline)
