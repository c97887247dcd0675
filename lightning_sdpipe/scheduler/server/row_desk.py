"""Desk of rows and spans: what workers did, update by update, as their heartbeats bring it.

The scheduler adds nothing up. It keeps the rows as they came, in chunks, writes them into the log, and gives them to
any program that asks. Spans are not kept: workers send them when a program has asked.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping

import msgspec

from lightning_sdpipe.policies.events import Progress, Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.log.event_log import Does, EventLog, Updates
from lightning_sdpipe.scheduler.rows import About, Chunk, Doing, SpanChunk
from lightning_sdpipe.scheduler.server.outbox import Outbox

RING_BYTES = 64 << 20
REPLY_BYTES = 1 << 20
SPANS_WITHIN = 3.0
"""Seconds within which workers must send their spans."""
SPANS_REPLY_BYTES = 3 << 20
MOST_ASKING = 16
"""Most programs that wait for spans; one more has the first answered with what there is."""


class RowRing:
    """The newest chunks of a run, encoded: at most ``limit`` bytes of them."""

    def __init__(self, limit: int = RING_BYTES) -> None:
        self._limit = limit
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._next = 0

    def add(self, chunk: Chunk) -> None:
        """Add the newest chunk."""
        data = msgspec.msgpack.encode(chunk)
        self._chunks.append(data)
        self._next += 1
        self._size += len(data)
        while self._size > self._limit:
            self._size -= len(self._chunks.popleft())

    def since(self, number: int) -> tuple[int, int, tuple[bytes, ...]]:
        """Return chunks from ``number`` on, or, if it is negative, that many of the newest: the number of the first
        one, the number to ask for next, and as many chunks as one reply holds."""
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
    """Keeps the rows of all workers, and their descriptions for people.

    Args:
        log: event log of the run.
        outbox: counts rows that make no sense.
    """

    def __init__(self, log: EventLog, outbox: Outbox) -> None:
        self._log, self._outbox = log, outbox
        self._ring = RowRing()
        self.about: dict[Worker, About] = {}
        """Descriptions that workers have given of themselves."""
        self._doing: dict[Worker, Doing] = {}

    def introduce(self, worker: Worker, about: About | None) -> None:
        """Note the description of ``worker``, if it gives one."""
        if about is not None:
            self.about[worker] = about

    def hear(self, request: e.Beat | m.Leave, joined: bool, peer: bytes, now: float) -> Progress | None:
        """Take the rows of a request, and return what a policy is told of them. Rows that make no sense, or come before
        the worker has ``joined``, are ignored; the rest of the request holds."""
        new, worker = request.rows, request.worker
        if new is None:
            return None
        if (fault := new.fault() if joined else "rows before it has joined") is not None:
            self._outbox.ignore("rows", peer, f"worker {worker} sends {fault}")
            return None
        chunk = Chunk(worker, request.incarnation, now - new.ago / 1e6, new.rows, new.dropped)
        self._ring.add(chunk)
        self._log.write(Updates(chunk, self.about.get(worker)))
        return new.progress(worker)

    def note(self, worker: Worker, doing: Doing | None, now: float) -> None:
        """Note what ``worker`` does, if it says so; log it if more than the time left has changed."""
        if doing is not None:
            before, self._doing[worker] = self._doing.get(worker), doing
            if before is None or msgspec.structs.replace(before, left=doing.left) != doing:
                self._log.write(Does(doing, worker, now))

    def answer(self, since: int, present: Collection[Worker], now: float) -> m.RowsReply:
        """Return the chunks from number ``since`` on, or that many of the newest if it is negative, and what workers
        do that are ``present``."""
        doing = tuple((worker, doing) for worker, doing in self._doing.items() if worker in present)
        return m.RowsReply(now, tuple(self.about.items()), *self._ring.since(since), doing)


class _Asking:
    """A request for the spans of ``updates`` updates, made at time ``at`` by the program behind ``peer``; the workers
    ``awaited`` have not sent theirs."""

    def __init__(self, peer: bytes, updates: int, at: float, awaited: set[Worker]) -> None:
        self.peer, self.updates, self.at, self.awaited = peer, updates, at, awaited
        self.until = at + SPANS_WITHIN
        self.told: dict[Worker, bytes] = {}

    def reply(self, about: Mapping[Worker, About]) -> m.SpansReply:
        """Return the spans that have come, as far as there is room."""
        chunks, left_out, size = [], [], 0
        for worker, data in sorted(self.told.items()):
            if size + len(data) > SPANS_REPLY_BYTES:
                left_out.append(worker)
            else:
                chunks.append(data)
                size += len(data)
        return m.SpansReply(tuple(about.items()), tuple(chunks), tuple(sorted(self.awaited)), tuple(left_out))


class SpanDesk:
    """Asks workers for their spans in answers to their beats, and answers the programs that have asked for them.

    Args:
        present: the workers whose processes are there.
        about: descriptions that workers have given of themselves.
        outbox: takes the answers.
    """

    def __init__(self, present: Mapping[Worker, object], about: Mapping[Worker, About], outbox: Outbox) -> None:
        self._present, self._about, self._outbox = present, about, outbox
        self._asking: list[_Asking] = []

    @property
    def deadline(self) -> float:
        """Time at which :meth:`tick` is due."""
        return self._asking[0].until if self._asking else math.inf  # the first is due first

    def ask(self, peer: bytes, updates: int, now: float) -> None:
        """Note that the program behind ``peer`` asks for the spans of ``updates`` updates, perhaps again."""
        if any(asking.peer == peer for asking in self._asking):
            return
        self._asking.append(_Asking(peer, updates, now, {*self._present}))
        if len(self._asking) > MOST_ASKING:
            self._asking[0].until = now
        self.tick(now)

    def note(self, beat: e.Beat, peer: bytes, now: float) -> e.Noted:
        """Return the answer to a ``beat``, after taking its spans."""
        worker, spans = beat.worker, beat.spans
        awaiting = [asking for asking in self._asking if worker in asking.awaited]
        if spans is not None and (fault := spans.fault()) is not None:
            self._outbox.ignore("spans", peer, f"worker {worker} sends {fault}")
        elif spans is not None and awaiting:
            data = msgspec.msgpack.encode(SpanChunk(worker, beat.incarnation, now, spans))
            for asking in [asking for asking in awaiting if asking.updates <= spans.updates]:
                awaiting.remove(asking)
                asking.awaited.discard(worker)
                asking.told[worker] = data
            self.tick(now)
        if not awaiting:
            return e.Noted(beat.number)
        most, first = max(asking.updates for asking in awaiting), min(asking.at for asking in awaiting)
        return e.Noted(beat.number, wants=(most, first, now))

    def tick(self, now: float) -> None:
        """Answer the programs that have waited long enough, or have the spans of all workers."""
        due = [asking for asking in self._asking if asking.until <= now or not asking.awaited]
        for asking in due:
            self._asking.remove(asking)
            self._outbox.say(asking.peer, asking.reply(self._about))
