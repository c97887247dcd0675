"""Detection of stuck exchanges: what workers report of theirs goes in with the time, exchanges to break off come out.

Two members that cannot reach each other would wait for each other, and the others of their group for them. An exchange
is stuck when all of its members that are there have begun it, some have not left it, and none of these has moved a
piece for a limit. Until the last one has begun, the others only wait for a slow one. Where groups are of whole
pipelines, the members are all workers of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from lightning_sdpipe.membership.members import Exchanging
from lightning_sdpipe.policies.events import Worker

BARRIERS = 2**30
"""Lowest number of barriers' exchanges; those of groups are below it."""


class Stuck:
    """The exchanges of all stages; ``limit`` is in seconds, and ``stands_for`` returns the member of groups that
    represents a worker."""

    def __init__(self, limit: float, stands_for: Callable[[Worker], Worker] = lambda worker: worker) -> None:
        self.due = math.inf
        """Time at which :meth:`look` may find something."""
        self._limit, self._stands_for = limit, stands_for
        self._in: dict[Worker, tuple[Exchanging, float]] = {}
        """Exchange of each worker, and since when it has not moved."""
        self._left: dict[Worker, tuple[int, int]] = {}

    def hear(self, worker: Worker, exchange: Exchanging | None, left: tuple[int, int], now: float) -> None:
        """Note that ``worker`` is in ``exchange``; the exchanges of groups and barriers that it left last are numbered
        ``left``."""
        self._left[worker] = left
        if exchange is None:
            self._in.pop(worker, None)
        elif worker not in self._in or self._in[worker][0] != exchange:
            self._in[worker] = exchange, now
            self.due = min(self.due, now + self._limit)

    def forget(self, worker: Worker) -> None:
        """Forget ``worker``, which is gone."""
        self._in.pop(worker, None)
        self._left.pop(worker, None)

    def look(self, now: float, here: Collection[Worker]) -> list[tuple[int, list[Worker]]]:
        """Return the numbers of stuck exchanges, and the workers in each; they are returned again when that does not
        help.

        Args:
            now: the time.
            here: workers that are not gone.
        """
        found: dict[tuple[int, int], list[Worker]] = {}
        for worker, (exchange, _) in self._in.items():
            found.setdefault((self._stands_for(worker).stage, exchange.sequence), []).append(worker)
        stuck = []
        for (stage, sequence), inside in found.items():
            members = {Worker(stage, i) for worker in inside for i in self._in[worker][0].pipelines}
            others = [other for other in here if self._stands_for(other) in members and other not in inside]
            begun = all(self._has_left(other, sequence) for other in others)
            since = max(self._in[worker][1] for worker in inside)
            if begun and now - since >= self._limit:
                stuck.append((sequence, sorted(inside)))
                for worker in inside:
                    self._in[worker] = self._in[worker][0], now
        self.due = now + self._limit / 4 if self._in else math.inf
        return stuck

    def _has_left(self, worker: Worker, sequence: int) -> bool:
        return self._left.get(worker, (-1, -1))[sequence >= BARRIERS] >= sequence
