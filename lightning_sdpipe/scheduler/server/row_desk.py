"""What workers did, update by update, as their heartbeats bring it.

The scheduler adds nothing up: it keeps the rows as they came, in chunks, writes them into the log, and gives them to
whatever asks.
"""

from __future__ import annotations

from collections import deque

import msgspec

from lightning_sdpipe.policies.events import Progress, Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.log.event_log import EventLog
from lightning_sdpipe.scheduler.rows import About, Chunk
from lightning_sdpipe.scheduler.server.outbox import Outbox

RING_BYTES = 64 << 20
REPLY_BYTES = 1 << 20


class RowRing:
    """The newest chunks of a run, as bytes: at most ``limit`` of them."""

    def __init__(self, limit: int = RING_BYTES) -> None:
        self._limit = limit
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._next = 0

    def add(self, chunk: Chunk) -> None:
        """It is the newest."""
        data = msgspec.msgpack.encode(chunk)
        self._chunks.append(data)
        self._next += 1
        self._size += len(data)
        while self._size > self._limit:
            self._size -= len(self._chunks.popleft())

    def since(self, number: int) -> tuple[int, int, tuple[bytes, ...]]:
        """Chunks from ``number`` on, or, if that is negative, so many of the newest: the number of the first one, that
        of the next to ask for, and as many of them as one reply holds."""
        oldest = self._next - len(self._chunks)
        first = min(self._next, max(oldest, number if number >= 0 else self._next + number))
        chunks: list[bytes] = []
        size = 0
        for at in range(first - oldest, len(self._chunks)):
            size += len(self._chunks[at])
            if size > REPLY_BYTES:
                break
            chunks.append(self._chunks[at])
        return first, first + len(chunks), tuple(chunks)


class RowDesk:
    """Keeps the rows of all workers, and what people know these by.

    Args:
        log: of the run.
        outbox: counts what makes no sense.
    """

    def __init__(self, log: EventLog, outbox: Outbox) -> None:
        self._log, self._outbox = log, outbox
        self._ring = RowRing()
        self._about: dict[Worker, About] = {}

    def introduce(self, worker: Worker, about: About | None) -> None:
        """``worker`` says what people know it by."""
        if about is not None:
            self._about[worker] = about

    def hear(self, request: e.Beat | m.Leave, joined: bool, peer: bytes, now: float) -> Progress | None:
        """What a policy hears of the updates that a worker tells of, which has ``joined``. Rows that make no sense are
        ignored; the rest of the request holds."""
        new, worker = request.rows, request.worker
        if new is None:
            return None
        if (fault := new.fault() if joined else "rows before it has joined") is not None:
            self._outbox.ignore("rows", peer, f"worker {worker} sends {fault}")
            return None
        chunk = Chunk(worker, request.incarnation, now - new.ago / 1e6, new.rows, new.dropped)
        self._ring.add(chunk)
        self._log.record_rows(chunk, self._about.get(worker))
        return new.progress(worker)

    def answer(self, request: m.AskRows, now: float) -> m.RowsReply:
        """What is asked for."""
        return m.RowsReply(now, tuple(self._about.items()), *self._ring.since(request.since))
