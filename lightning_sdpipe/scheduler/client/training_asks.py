"""Requests of a worker's training thread to the scheduler, and its beliefs from the answers: a part of the
:class:`~lightning_sdpipe.scheduler.client.conversation.Conversation` of the worker's process.

Rules:

1. A request is open until it is answered, refused, or another one of its kind takes its place; joining and leaving take
   each other's. It is repeated under new numbers, since the scheduler counts each number once.
2. :meth:`TrainingAsks.resumption` holds what a restarted scheduler must know.
3. A worker that begins to leave no longer takes part. Its unanswered ready is not repeated, and dropped when the
   scheduler has noted that: until then its group may have been decided.
4. A reply that is repeated, or was overtaken, changes nothing.

The module also keeps the rows and spans that the worker still has to report, the leases that its pipeline was dealt
and, for a restarted scheduler, the groups that other members may not have heard of.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import msgspec

from lightning_sdpipe import meter
from lightning_sdpipe.dealing.leases import Done, Lease, Segment
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.membership_protocol import Answer, Book
from lightning_sdpipe.scheduler.rows import MOST, About, NewRows, Spans, UpdateRow

log = logging.getLogger(__name__)

MEMBERS_IN_REPORT = 15_000
"""Most members of all groups in one report: each takes up to 40 bytes of the largest request."""
_LONGEST_AGO = 1e6
"""Most seconds that a program can have waited for spans."""
RECENT = 32
"""Batches whose mean length is reported."""

Kind: TypeAlias = type[m.Request]


@dataclass(frozen=True)
class Came:
    """A reply to the open request of that kind came, or its refusal."""

    kind: Kind
    reply: m.Reply | e.Reply


class TrainingAsks:
    """The requests of the training thread of one worker.

    Args:
        worker: this process's worker.
        make: makes a request of that kind with these fields, under a new number.
        mesh: the shape of the run, which the scheduler must serve; None checks nothing.
        clock: returns seconds.
    """

    def __init__(
        self, worker: Worker, make: Callable[..., Any], mesh: m.Shape | None, clock: Callable[[], float]
    ) -> None:
        self.worker, self._make, self._mesh = worker, make, mesh
        self.joined = False
        """True if the worker takes part, for all it knows."""
        self.leases, self.rows, self.spans = HeardLeases(clock), RowBuffer(), SpanReport()
        self.about: About | None = None
        """Description of this worker for people, sent when it joins."""
        self.waits_for = ""
        """Last word of the scheduler on what is missing."""
        self._open: dict[Kind, list[m.Request]] = {}
        """All messages that were sent for each open request, the newest last."""
        self._heard = HeardAnswers(worker)
        self._answered: int | None = None
        """Iteration whose group was heard of last, since the worker joined."""

    def ask(self, kind: Kind, *fields: Any) -> m.Request:
        """Open a request, and return the message to send."""
        self.waits_for = ""
        if kind is m.Hello:
            fields = (self._mesh,)
        elif kind is m.Join:
            fields = self._mesh, self.about
            self._open.pop(m.Leave, None)
        elif kind is m.Leave:
            self.joined, self._answered = False, None
            self._heard.forget()
            self._open.pop(m.Join, None)
            fields = (self.rows.take(),)
        elif kind is m.AskLease:
            self.leases.begin(fields[0])
            fields = *fields, self.leases.done()
        request: m.Request = self._make(kind, *fields)
        self._open[kind] = [request]
        return request

    def told(self) -> tuple[bool, NewRows | None, tuple[Segment, Done] | None, Spans | None, int]:
        """Return a beat's report on the training thread; rows and spans are reported once."""
        waits = 0 if self.spans.meter is None else int(self.spans.meter.seconds_waiting())
        return self.joined, self.rows.take(), self.leases.progress(), self.spans.take(), waits

    def asks(self, *kinds: Kind) -> bool:
        """Return whether a request of any of these kinds is open."""
        return any(kind in self._open for kind in kinds)

    def again(self) -> list[m.Request]:
        """Return the open requests that are to be repeated, under new numbers."""
        requests: list[m.Request] = []
        for kind, sent in self._open.items():
            fields = list(msgspec.structs.astuple(sent[-1])[3:])
            if kind is m.AskLease:
                fields[-1] = self.leases.done()
            elif kind is m.Leave:
                fields = [None]  # its rows may have been heard, and would count twice
            elif kind is m.Ready and m.Leave in self._open:
                continue
            sent.append(self._make(kind, *fields))
            requests.append(sent[-1])
        return requests

    def resumption(self) -> dict[str, Any]:
        """Return fields of :class:`~lightning_sdpipe.scheduler.membership_protocol.Resumes`."""
        heard = self._heard
        fields = {"heard": heard.highest, "book": self.leases.book(), "joined": self.joined, "about": self.about}
        return {**fields, "answered": self._answered, "answers": heard.to_report()} if self.joined else fields

    def hear(self, reply: m.Reply | e.Reply) -> list[Came]:
        """Return what follows from ``reply``, which came on the training thread's socket."""
        if isinstance(reply, e.Waits) and any(sent[-1].number == reply.number for sent in self._open.values()):
            self.waits_for = reply.reason
        answered = [kind for kind, sent in self._open.items() if self._is_answered(sent, reply)]
        for kind in answered:
            del self._open[kind]
        if m.Leave in answered:
            self._open.pop(m.Ready, None)
            self._answered = None
            self._heard.forget()
        return [Came(kind, reply) for kind in answered]

    def _is_answered(self, sent: list[m.Request], reply: m.Reply | e.Reply) -> bool:
        """Return whether ``reply`` answers the request ``sent``, and if so believe it."""
        match sent[-1], reply:
            case _, e.Refused(number=number):
                return number in [request.number for request in sent]
            case m.Ready(iteration=iteration), m.Answer() if m.iteration_of(self.worker, reply) == iteration:
                self._heard.hear(reply)
                self._answered = iteration
                return True
            case m.AskLease(segment=segment, ordinal=ordinal), m.Dealt(lease=lease):
                if (lease.segment, lease.ordinal) == (segment, ordinal):
                    self.leases.hear(lease)
                    return True
            case m.Join(), e.Noted(number=number) if number >= sent[0].number:
                self.joined = True
                return True
            case m.Leave(), e.Noted(number=number):
                return number >= sent[0].number
        return isinstance(sent[-1], m.Hello) and isinstance(reply, m.Welcome)


class HeardAnswers:
    """A worker's half of :class:`~lightning_sdpipe.scheduler.server.session.ReportedAnswers`: answers that it has
    heard, and that another member may not have."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._last_with: dict[Worker, Answer] = {}
        self.highest = -1
        """Highest sequence of a group that was heard of."""

    def hear(self, answer: Answer) -> None:
        """Note the answer to this worker's ready."""
        group = answer.group
        self.highest = max(self.highest, group.sequence)
        for member in group.members:
            if not group.passive or member not in group.passive:  # a passive member asks for nothing
                self._last_with[member] = answer

    def to_report(self) -> tuple[Answer, ...]:
        """Return each answer once, oldest first; if not all fit into a request, the newest."""
        unique = {answer.group.sequence: answer for answer in self._last_with.values()}
        newest_first = sorted(unique, reverse=True)
        sizes = accumulate(len(unique[number].group.members) for number in newest_first)
        fitting = [number for number, members in zip(newest_first, sizes, strict=True) if members <= MEMBERS_IN_REPORT]
        if len(fitting) < len(unique):
            log.warning("worker %s cannot report %d groups at once", self._worker, len(unique) - len(fitting))
        return tuple(unique[number] for number in reversed(fitting))

    def forget(self) -> None:
        """Forget all answers when the worker leaves: all its groups have averaged, so their members have heard of
        them."""
        self._last_with.clear()


class HeardLeases:
    """The leases of the segment that is trained now, and how far the worker is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._segment: Segment | None = None
        self._leases: dict[int, Lease] = {}
        self._trained = self._loose = 0
        self._ended_at = 0.0
        self._begins = True
        """True if the next batch begins with the start of a loader."""
        self._first: float | None = None
        """Seconds that such a batch took, used only while no other batch was timed."""
        self._lengths: deque[float] = deque(maxlen=RECENT)

    def begin(self, segment: Segment) -> None:
        """Start ``segment``, unless it is trained already."""
        if segment != self._segment:
            self._segment, self._leases, self._trained, self._loose = segment, {}, 0, 0
            self._ended_at, self._begins = self._clock(), True

    def hear(self, lease: Lease) -> None:
        """Note the lease."""
        if lease.segment != self._segment:
            return
        before = self._leases.get(lease.ordinal - 1)
        if before is not None and not before.size:  # the pipeline stood still
            self._ended_at, self._begins = self._clock(), True
        self._leases[lease.ordinal] = lease

    def trained(self, batches: int, loose: int = 0) -> None:
        """Note that so many batches of the segment are trained, and that no other model has the last ``loose``."""
        now = self._clock()
        if batches > self._trained:
            length = (now - self._ended_at) / (batches - self._trained)
            if self._begins:
                self._first = length
            else:
                self._lengths.append(length)
        self._trained, self._ended_at, self._begins, self._loose = batches, now, False, loose

    def done(self) -> Done:
        """Return the worker's progress in this segment."""
        seconds = sum(self._lengths) / len(self._lengths) if self._lengths else self._first
        return Done(self._trained, seconds, self._clock() - self._ended_at, self._loose)

    def progress(self) -> tuple[Segment, Done] | None:
        """Return the segment and the worker's progress; None before its first segment."""
        return None if self._segment is None else (self._segment, self.done())

    def book(self) -> Book | None:
        """Return all leases of this segment, in order, and whether it is over."""
        if self._segment is None:
            return None
        leases = tuple(self._leases[ordinal] for ordinal in sorted(self._leases))
        return Book(self._segment, leases, any(lease.over for lease in leases), self.done())


class RowBuffer:
    """A worker's rows that no heartbeat has taken yet, :data:`~lightning_sdpipe.scheduler.rows.MOST` at most. Where
    updates come faster than heartbeats may carry them, neighbouring rows are merged into one with the number of its
    updates, so that sums stay exact.

    Args:
        clock: returns nanoseconds, as the meter's does.
    """

    def __init__(self, clock: Callable[[], int] = meter.CLOCK) -> None:
        self._clock = clock
        self._rows: list[tuple[UpdateRow, int, bool]] = []
        """Rows, each with its end, and whether it follows the one before without a pause."""
        self._dropped = 0

    def add(self, update: int, row: meter.MeterRow, group: int = -1) -> bool:
        """Add the row of ``update``, which waited for that group. Return True when there are as many rows as a
        heartbeat carries."""
        if len(self._rows) >= MOST:
            self._halve()
        self._rows.append((UpdateRow(update, 1, row.us, row.core, group), row.ended, row.follows))
        return len(self._rows) == MOST

    def take(self) -> NewRows | None:
        """Take the rows up to the next pause; None if there are none."""
        if not self._rows:
            return None
        count = 1
        while count < len(self._rows) and self._rows[count][2]:
            count += 1
        taken, self._rows = self._rows[:count], self._rows[count:]
        dropped, self._dropped = self._dropped, 0
        return NewRows(tuple(row for row, _, _ in taken), max(0, self._clock() - taken[-1][1]) // 1000, dropped)

    def _halve(self) -> None:
        halved: list[tuple[UpdateRow, int, bool]] = []
        alone = False
        """True while the last merged row lacks a partner."""
        for row, ended, follows in self._rows:
            if alone and follows:
                before, _, followed = halved[-1]
                us = tuple(a + b for a, b in zip(before.us, row.us, strict=True))
                both = UpdateRow(row.update, before.count + row.count, us, before.core + row.core)
                halved[-1] = both, ended, followed
                alone = False
            else:
                halved.append((row, ended, follows))
                alone = True
        if len(halved) == len(self._rows):  # pauses everywhere, so no two rows were merged
            self._dropped += halved.pop(0)[0].count
        self._rows = halved


class SpanReport:
    """Spans that the training thread's ``meter`` keeps, for the scheduler when it asks for them.

    Args:
        clock: returns nanoseconds, as the meter's does.
    """

    def __init__(self, clock: Callable[[], int] = meter.CLOCK) -> None:
        self.meter: meter.Meter | None = None
        self._clock = clock
        self._wanted: tuple[int, int, float, int] | None = None

    def want(self, updates: int, until: float, asked: float) -> None:
        """Note the scheduler's request for the spans of so many updates that had ended at ``until``, when its clock
        shows ``asked`` (both in seconds)."""
        heard = self._clock()
        self._wanted = updates, heard - round(1e9 * min(_LONGEST_AGO, max(0.0, asked - until))), asked, heard // 1000

    def take(self) -> Spans | None:
        """Return the spans if they are wanted, else None."""
        if self._wanted is None:
            return None
        (updates, until, asked, heard), self._wanted = self._wanted, None
        kept = [] if self.meter is None else self.meter.recent(updates, until)
        said = self._clock() // 1000
        spans = meter.HIDDEN, *range(len(meter.PHASES))
        told = ((w, said - begin // 1000, said - end // 1000 if w in spans else end) for w, begin, end in kept)
        return Spans(updates, asked, heard, said, tuple(told))
