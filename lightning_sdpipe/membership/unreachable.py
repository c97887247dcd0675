"""Whose silence means death: what was heard of whom goes in with the time, who is lost comes out.

A process that has been silent for a limit takes its pipeline with it, but only on the word of a *witness*: another
member, all of whose processes were heard of after that limit had passed. The reasons:

- If all members fall silent within one limit of each other, the scheduler has been cut off from them, and they still
  reach each other. Nobody is lost then. When one of them is heard of again, the others get as long as the silence
  lasted, and a limit at least: TCP repeats what it has sent after pauses that double.
- A last member has no witness. It is never lost for silence: nobody else has its model.
- A new start of a silent pipeline shows by itself that the old one is over.

Before there are members, any other pipeline is a witness.

Which pipelines cannot reach each other, and which of them is put out.

When pipelines find no process group in common, an epoch of membership begins in which every worker tries to reach each
other one of its stage, and says whom it could not. Two that miss each other in several such epochs in a row cannot both
stay: the one goes that most others miss, and of these the youngest. If that explains nothing, the youngest goes after
some more epochs. It is let in again after a pause that doubles each time, since it would hold up the others again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from lightning_sdpipe.policies.events import Worker

TRANSFERS = 3
"""In a row that a newcomer misses before it is put out, too."""
EPOCHS = 3
"""In a row, in which two that miss each other are missed."""
UNEXPLAINED = 8
"""The same, if nobody says whom it misses."""
TRIED_FOR = 3.0
"""Seconds after which an epoch has shown who reaches whom."""
IN_A_ROW = 15.0
"""Seconds between two epochs in vain, at most, if they are to count as such."""
LONGEST_PAUSE = 3600.0


class Reach:
    """Of one run; ``pause`` is in seconds."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._missed: set[frozenset[int]] = set()
        """Pairs, in this epoch."""
        self._apart: dict[frozenset[int], int] = {}
        """In how many in a row."""
        self._in_vain = 0
        self._last = -math.inf
        self._transfers: Counter[int] = Counter()
        self._out: dict[int, tuple[float, float]] = {}
        """Until when each is out, and for how long that was."""

    def misses(self, pipeline: int, others: Iterable[int]) -> None:
        """A worker of ``pipeline`` cannot reach those of ``others`` in this epoch."""
        self._missed |= {frozenset((pipeline, other)) for other in others}

    def found_none(
        self, pipelines: Sequence[int], members: Sequence[int], waited: bool, now: float
    ) -> tuple[int, list[int]] | None:
        """``pipelines`` have found no process group in common; who is put out, if anybody, and whom it cannot reach.

        Args:
            pipelines: who tried.
            members: of the epoch, oldest first.
            waited: for the process group of the epoch; else they had one, in which an exchange broke off.
            now: the time.
        """
        if now - self._last < TRIED_FOR:
            return None
        in_a_row = now - self._last <= IN_A_ROW
        self._in_vain = int(waited) + (self._in_vain if waited and in_a_row else 0)
        self._last = now
        among = set(members)
        self._apart = {pair: self._apart.get(pair, 0) + 1 for pair in self._missed if pair <= among}
        self._missed = set()
        pairs = [pair for pair, count in self._apart.items() if count >= EPOCHS]
        candidates = {i for pair in pairs for i in pair}
        if self._in_vain >= UNEXPLAINED:
            candidates = candidates or among & {*pipelines}
        if len(candidates) < 2:
            return None
        missed_by = Counter(i for pair in pairs for i in pair)
        who = max(candidates, key=lambda i: (missed_by[i], members.index(i)))
        self._in_vain, self._apart = 0, {}
        return who, sorted({i for pair in pairs if who in pair for i in pair} - {who})

    def got_none(self, pipeline: int, now: float) -> None:
        """The newcomer ``pipeline`` did not get the state of a member."""
        self._transfers[pipeline] += 1
        if self._transfers[pipeline] % TRANSFERS == 0:
            self.put_out(pipeline, now)

    def has_come(self, pipeline: int) -> None:
        """It has got one."""
        del self._transfers[pipeline]

    def put_out(self, pipeline: int, now: float) -> None:
        """It is not let in for a while."""
        _, before = self._out.get(pipeline, (0.0, self._pause / 2))
        pause = min(2 * before, LONGEST_PAUSE)
        self._out[pipeline] = now + pause, pause

    def let_in(self, now: float) -> None:
        """Those whose pause is over."""
        for pipeline, (until, pause) in self._out.items():
            if until <= now:
                self._out[pipeline] = -math.inf, pause

    def out_until(self, pipeline: int) -> float:
        """When ``pipeline`` is let in; never in the past, once :meth:`let_in` has been called."""
        return self._out.get(pipeline, (-math.inf, 0.0))[0]


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
