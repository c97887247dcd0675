"""At which batches all look at the clock, so that a limit of time does not hold the pipelines in step.

Lightning asks after every batch whether ``max_time`` is over or a checkpoint is due by the clock, and takes rank 0's
answer, which makes all workers wait for rank 0 each time. Here the workers agree on the number of the batch after which
they ask next: half of the way to what is due next, as far as rank 0 can tell from its pace. So they meet some ten
times on the way to a limit, and at the end of it after every batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

_SOONEST, _LATEST = 1, 2**40


class ClockChecks:
    """Agreed on among all workers. Counts batches from the start of training, which all workers do alike.

    Args:
        waits: each returns the seconds until something is due, and infinity if nothing is; asked on rank 0.
        from_rank_zero: gives all workers rank 0's number; all workers call it at the same batch.
    """

    def __init__(self, waits: Sequence[Callable[[], float]], from_rank_zero: Callable[[int], int]) -> None:
        self._waits = waits
        self._from_rank_zero = from_rank_zero
        self._batch = 0
        self._time = time.monotonic()
        self._next: int | None = None
        self.now = False
        """May the clock be looked at? All workers are together."""

    def start(self, batch: int) -> None:
        """Training starts or goes on after ``batch`` batches; the first look is after the next one."""
        self.now = False
        self._batch, self._time, self._next = batch, time.monotonic(), batch + 1

    @property
    def next(self) -> int | None:
        """After how many batches all look at the clock next; None if nothing is ever due by it."""
        return self._next if self._waits else None

    def due(self, batch: int) -> bool:
        """Is it agreed to look at the clock after ``batch`` batches?"""
        return bool(self._waits) and self._next is not None and batch >= self._next

    def renew(self, batch: int) -> None:
        """Agrees on the next time, after what was due has been done."""
        self.now = False
        now = time.monotonic()
        pace = (now - self._time) / max(1, batch - self._batch)
        way = min(wait() for wait in self._waits) / 2
        batches = min(max(way / max(pace, 1e-6), _SOONEST), _LATEST)
        self._batch, self._time = batch, now
        self._next = batch + self._from_rank_zero(int(batches))
