"""Failure detection by silence: the times at which workers were heard of go in, lost workers come out.

Workers that fall silent together form a *unit*: a pipeline of an elastic run, one of whose processes takes the others
with it, and each worker of an ordinary run. A unit that has been silent for a limit is lost, but only on the word of a
*witness*: another unit, all of whose processes were heard of after that limit had passed. The reasons:

- If all fall silent within one limit of each other, the scheduler has been cut off from them, and they still reach each
  other. None is lost then. When one of them is heard of again, the others get as long as the silence lasted, and a
  limit at least: TCP repeats what it has sent after pauses that double.
- A last unit has no witness. It is never lost for silence: its model exists nowhere else.
- A new start of a silent pipeline shows by itself that the old one is over.
- The scheduler looks four times in a limit. If it is late by such a quarter it was away itself (a machine asleep, a
  stopped process), and what it did not hear meanwhile counts for nothing.

Where some units are members, only these are witnesses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection

from lightning_sdpipe.policies.events import Worker

logger = logging.getLogger(__name__)


class Silence:
    """The silence of all processes of a run, from ``since`` on; ``limit`` is in seconds, and ``unit`` names a worker's
    unit."""

    def __init__(self, limit: float, since: float, unit: Callable[[Worker], object] = lambda worker: worker) -> None:
        self.due = since + limit / 4
        """Time of the next :meth:`look`."""
        self.of_all_since: float | None = None
        """Time since which no member has been heard of, if that has lasted for the limit."""
        self.lost: dict[Worker, float] = {}
        """Workers that have not been heard of since they were lost, and when each was last heard of."""
        self._limit = limit
        self._unit = unit
        self._heard: dict[Worker, float] = {}
        self._excused = -math.inf
        """Time before which silence does not count."""
        self._suspects = False

    def hear(self, worker: Worker, at: float) -> None:
        """Note that a message of ``worker`` came."""
        if at > self.lost.get(worker, -math.inf):
            self.lost.pop(worker, None)
            if self._suspects and at > self._heard.get(worker, -math.inf):
                self.due = min(self.due, at)
            self._heard[worker] = at

    def forget(self, worker: Worker) -> None:
        """Forget ``worker``, which is gone."""
        self._heard.pop(worker, None)
        self.lost.pop(worker, None)

    def look(
        self, now: float, members: Collection[object] = (), replaced: Collection[object] = ()
    ) -> list[tuple[Worker, float]]:
        """Return the processes that are lost since the last look, and for how many seconds each has been silent.

        Args:
            now: the time.
            members: units that train.
            replaced: units whose number another start has claimed.
        """
        if now - self.due > self._limit / 4:
            logger.warning("the scheduler was held up for %.1f s; no worker is called lost for that", now - self.due)
            self._excused = max(now, self._excused)
        heard: dict[object, float] = {}
        for worker, at in self._heard.items():
            unit = self._unit(worker)
            heard[unit] = min(at, heard.get(unit, math.inf))
        trusted = {unit: at for unit, at in heard.items() if unit in members} or heard
        began = self.of_all_since
        if began is not None and any(now - max(trusted[unit], self._excused) < self._limit for unit in trusted):
            logger.warning("workers are heard of again, after %.1f s", now - began)
            self.of_all_since, self._excused = None, now + max(0.0, now - began - self._limit)
        since = {unit: max(at, self._excused) for unit, at in heard.items()}
        late = {unit for unit, at in since.items() if now - at >= self._limit}
        if trusted and late >= trusted.keys() and self.of_all_since is None:
            self.of_all_since = max(trusted.values())
        lost = {
            unit
            for unit in late
            if unit in replaced or any(at >= since[unit] + self._limit for i, at in trusted.items() if i != unit)
        }
        self._suspects = lost != late
        first = min((at for unit, at in since.items() if unit not in late), default=math.inf) + self._limit
        self.due = min(first, now + self._limit / 4)
        found = [
            (worker, now - at)
            for worker, at in self._heard.items()
            if self._unit(worker) in lost and now - max(at, self._excused) >= self._limit
        ]
        for worker, _ in found:
            self.lost[worker] = self._heard.pop(worker)
        return found
