"""Whose silence means death: what was heard of whom goes in with the time, who is lost comes out.

A process that has been silent for a limit takes its pipeline with it, but only on the word of a *witness*: another
member, all of whose processes were heard of after that limit had passed. The reasons:

- If all members fall silent within one limit of each other, the scheduler has been cut off from them, and they still
  reach each other. Nobody is lost then. When one of them is heard of again, the others get as long as the silence
  lasted, and a limit at least: TCP repeats what it has sent after pauses that double.
- A last member has no witness. It is never lost for silence: nobody else has its model.
- A new start of a silent pipeline shows by itself that the old one is over.

Before there are members, any other pipeline is a witness.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from lightning_sdpipe.policies.events import Worker


class Silence:
    """Of all processes of a run; ``limit`` is in seconds."""

    def __init__(self, limit: float) -> None:
        self.due = math.inf
        """When :meth:`look` may have something to say."""
        self.of_all_since: float | None = None
        """Since when nothing has come of any member, if that has lasted for the limit."""
        self._limit = limit
        self._heard: dict[Worker, float] = {}
        self._excused = -math.inf
        """Silence before that time counts for nothing."""
        self._suspects = False

    def hear(self, worker: Worker, now: float) -> None:
        """Something of ``worker`` came."""
        self._heard[worker] = now
        self.due = now if self._suspects else min(self.due, now + self._limit)

    def forget(self, worker: Worker) -> None:
        """It is gone."""
        self._heard.pop(worker, None)

    def excuse(self, now: float) -> None:
        """Nobody could be heard until ``now``."""
        self._excused = max(now, self._excused)

    def look(self, now: float, members: Collection[int], replaced: Collection[int] = ()) -> list[tuple[Worker, float]]:
        """Who is lost, and for how many seconds it has been silent.

        Args:
            now: the time.
            members: pipelines that train.
            replaced: pipelines of which another start has come.
        """
        heard: dict[int, float] = {}
        for worker, at in self._heard.items():
            heard[worker.pipeline] = min(at, heard.get(worker.pipeline, math.inf))
        since = {i: max(at, self._excused) for i, at in heard.items()}
        trusted = {i: at for i, at in heard.items() if i in members} or heard
        if self.of_all_since is not None and any(now - since[i] < self._limit for i in trusted):
            lasted, self.of_all_since = now - self.of_all_since, None
            self._excused = now + max(0.0, lasted - self._limit)
            since = {i: max(at, self._excused) for i, at in heard.items()}
        late = {i for i, at in since.items() if now - at >= self._limit}
        if trusted and late >= trusted.keys() and self.of_all_since is None:
            self.of_all_since = max(trusted.values())
        lost = {
            i
            for i in late
            if i in replaced or any(at >= since[i] + self._limit for other, at in trusted.items() if other != i)
        }
        self._suspects = lost != late
        self.due = min((at for i, at in since.items() if i not in late), default=math.inf) + self._limit
        if self._suspects:  # another start may come of one
            self.due = min(self.due, now + self._limit / 4)
        found = [
            (worker, now - at)
            for worker, at in self._heard.items()
            if worker.pipeline in lost and now - max(at, self._excused) >= self._limit
        ]
        for worker, _ in found:
            del self._heard[worker]
        return found
