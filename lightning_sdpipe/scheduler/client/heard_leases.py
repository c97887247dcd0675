"""What a worker knows of the batches that its pipeline was dealt, and how fast it trains them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from lightning_sdpipe.dealing.leases import Done, Lease, Segment

RECENT = 32
"""Batches whose mean length is told."""


class HeardLeases:
    """Told by the training thread, asked by it and the heartbeats'."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self._leases: dict[int, Lease] = {}
        self._trained = 0
        self._ended_at = 0.0
        self._begins = True
        """Does the next batch begin with the start of a loader?"""
        self._first: float | None = None
        """How long such a batch took, which says little, but more than nothing."""
        self._lengths: deque[float] = deque(maxlen=RECENT)

    def begin(self, segment: Segment) -> None:
        """``segment`` is trained now; nothing happens if it is already."""
        with self._lock:
            if segment != self._segment:
                self._segment, self._leases, self._trained = segment, {}, 0
                self._ended_at, self._begins = self._clock(), True

    def hear(self, lease: Lease) -> None:
        """``lease`` came."""
        with self._lock:
            if lease.segment != self._segment:
                return
            before = self._leases.get(lease.ordinal - 1)
            if before is not None and not before.size:  # it stood still
                self._ended_at, self._begins = self._clock(), True
            self._leases[lease.ordinal] = lease

    def trained(self, batches: int) -> None:
        """So many batches of the segment are trained."""
        with self._lock:
            now = self._clock()
            if batches > self._trained:
                length = (now - self._ended_at) / (batches - self._trained)
                if self._begins:
                    self._first = length
                else:
                    self._lengths.append(length)
            self._trained, self._ended_at, self._begins = batches, now, False

    def done(self) -> Done:
        """In this segment."""
        with self._lock:
            return self._done()

    def progress(self) -> tuple[Segment, Done] | None:
        """How far the worker is; None before its first segment."""
        with self._lock:
            return None if self._segment is None else (self._segment, self._done())

    def book(self) -> tuple[Segment, tuple[Lease, ...], bool, Done] | None:
        """All that was heard of this segment, in order, and whether it is over."""
        with self._lock:
            if self._segment is None:
                return None
            leases = tuple(self._leases[ordinal] for ordinal in sorted(self._leases))
            return self._segment, leases, any(lease.over for lease in leases), self._done()

    def _done(self) -> Done:
        seconds = sum(self._lengths) / len(self._lengths) if self._lengths else self._first
        return Done(self._trained, seconds, self._clock() - self._ended_at)
