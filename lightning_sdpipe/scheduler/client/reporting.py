"""What a worker reports to the scheduler: rows, spans, its progress with its pipeline's leases and, to a restarted
scheduler, these leases."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from lightning_sdpipe import meter
from lightning_sdpipe.dealing.leases import START, Book, Done, Lease, Segment
from lightning_sdpipe.scheduler.rows import MOST, NewRows, Spans, UpdateRow

_LONGEST_AGO = 1e6
"""Most seconds that a program can have waited for spans."""
RECENT = 32
"""Batches whose mean length is reported."""
MOST_VAIN = 32
"""Most segments in a row after which a pipeline that was dealt nothing is tried again."""


class HeardLeases:
    """The leases of the current segment, and the worker's progress in it.

    The first batch of a segment takes longer than others: it starts a loader, and the very first one may compile. It
    counts only for later segments, if no other batch was timed and no higher speed is known: as its time less up to
    :data:`START`. A pipeline that is dealt nothing is never timed again, though its stall may be over: after 1, 2, 4 …
    segments without a batch its speed is unknown again, until it gets batches by its speed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._segment: Segment | None = None
        self._leases: dict[int, Lease] = {}
        self._trained = self._loose = 0
        self.stops = False
        """True once the user has asked for the end of training."""
        self._ended_at = 0.0
        self._begins = True
        """True if the next batch begins with the start of a loader."""
        self._first: float | None = None
        """Seconds of the last batch that did, in this segment."""
        self._timed = self._tried = False
        """Whether another batch of this segment was timed, and whether the pipeline is tried again in it."""
        self._vain, self._patience = 0, 1
        """Segments in a row without a batch, and after how many the pipeline is tried again."""
        self._lengths: deque[float] = deque(maxlen=RECENT)

    def begin(self, segment: Segment) -> None:
        """Start ``segment``, unless it is the current one."""
        if segment != self._segment:
            self._look_back()
            self._first, self._timed = None, False
            self._segment, self._leases, self._trained, self._loose = segment, {}, 0, 0
            self._ended_at, self._begins, self.stops = self._clock(), True, False

    def hear(self, lease: Lease) -> None:
        """Note the lease."""
        if lease.segment != self._segment:
            return
        before = self._leases.get(lease.ordinal - 1)
        if before is not None and not before.size:  # the pipeline stood still
            self._ended_at, self._begins = self._clock(), True
        self._leases[lease.ordinal] = lease

    def trained(self, batches: int, loose: int = 0) -> None:
        """Note that ``batches`` of the segment are trained, and that no other model has the last ``loose``."""
        now = self._clock()
        if batches > self._trained:
            length = (now - self._ended_at) / (batches - self._trained)
            if self._begins:
                self._begins, self._first = False, length
            else:
                self._timed = True
                self._lengths.append(length)
        self._trained, self._ended_at, self._loose = batches, now, loose

    def done(self) -> Done:
        """Return the worker's progress in this segment."""
        seconds = sum(self._lengths) / len(self._lengths) if self._lengths else None
        return Done(self._trained, seconds, self._clock() - self._ended_at, self._loose, self.stops)

    def progress(self) -> tuple[Segment, Done] | None:
        """Return the segment and the worker's progress; None before its first segment."""
        return None if self._segment is None else (self._segment, self.done())

    def book(self) -> Book | None:
        """Return all leases of this segment, in order, and whether it is over."""
        if self._segment is None:
            return None
        leases = tuple(self._leases[ordinal] for ordinal in sorted(self._leases))
        return Book(self._segment, leases, any(lease.over for lease in leases), self.done())

    def _look_back(self) -> None:
        """Keep what the segment that ends has shown of the pipeline's speed."""
        if self._trained:
            self._vain, self._patience, self._tried = 0, self._patience if self._tried else 1, False
        if self._first is not None and not self._timed:
            if not self._lengths or sum(self._lengths) > self._first * len(self._lengths):
                rest = max(self._first - START, self._first / 2)
                self._lengths = deque([rest] if self._first > START else [], RECENT)
        elif self._lengths and not self._trained:
            self._vain += 1
            if self._vain >= self._patience:
                self._lengths.clear()
                self._vain, self._patience, self._tried = 0, min(2 * self._patience, MOST_VAIN), True


class RowBuffer:
    """A worker's rows that no heartbeat has taken yet, :data:`~lightning_sdpipe.scheduler.rows.MOST` at most. Where
    updates come faster than heartbeats may carry them, neighbouring rows are merged into one that counts its updates,
    so that sums stay exact.

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
        """Note the scheduler's request, made when its clock showed ``asked``, for the spans of the last ``updates``
        that had ended at ``until`` (both in seconds)."""
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
