"""Failure detection: workers that have fallen silent, exchanges that are stuck, and pipelines that cannot reach each
other. Reports and the time go in; what is lost, or to be broken off or put out, comes out."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from lightning_sdpipe.membership.members import Exchanging
from lightning_sdpipe.policies.events import Worker

logger = logging.getLogger(__name__)

BARRIERS = 2**30
"""Lowest number of barriers' exchanges; those of groups are below it."""
TRANSFERS = 3
"""Transfers in a row that a newcomer must miss to be put out, too."""
EPOCHS = 3
"""Epochs in a row in which two pipelines must miss each other."""
UNEXPLAINED = 8
"""Epochs in a row after which one is put out although no pipeline reports which others it misses."""
TRIED_FOR = 3.0
"""Seconds after which an epoch has shown which pipelines reach each other."""
IN_A_ROW = 15.0
"""Most seconds between two epochs in vain for them to count as consecutive."""
LONGEST_PAUSE = 3600.0
REMEMBERED = 256
"""Most recent given-up exchanges that are remembered."""


class Silence:
    """The silence of all processes of a run, from ``since`` on; ``limit`` is in seconds, and ``unit`` names a worker's
    unit.

    Workers that fall silent together form a *unit*: a pipeline of an elastic run, one of whose processes takes the
    others with it, and each worker of an ordinary run. A unit that has been silent for a limit is lost, but only on the
    word of a *witness*: another unit, all of whose processes were heard of after that limit had passed. The reasons:

    - If all fall silent within one limit of each other, the scheduler has been cut off from them, and they still reach
      each other. None is lost then. When one of them is heard of again, the others get as long as the silence lasted,
      and a limit at least: TCP repeats what it has sent after pauses that double.
    - A last unit has no witness. It is never lost for silence: its model exists nowhere else.
    - A new start of a silent pipeline shows by itself that the old one is over.
    - The scheduler looks every quarter of a limit. If it is late by as much, it was away itself (a machine asleep, a
      stopped process), and what it did not hear meanwhile counts for nothing.

    Where some units are members, only these are witnesses.
    """

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


class Stuck:
    """The exchanges of all stages; ``limit`` is in seconds.

    Two members that cannot reach each other would wait for each other, and the others of their group for them. An
    exchange is stuck when all of its members that are there have begun it, some have not left it, and none of these has
    moved a byte for a limit. Until the last one has begun, the others only wait for a slow one. One that a member has
    given up, or will never begin, is stuck at once. The latter happens where an earlier scheduler died between its
    answers to the members: one that did not hear of the group gets another for the same ready.
    """

    def __init__(self, limit: float) -> None:
        self.due = math.inf
        """Time at which :meth:`look` may find something."""
        self._limit = limit
        self._in: dict[Worker, tuple[Exchanging, float]] = {}
        """Exchange of each worker, and since when it has not moved."""
        self._left: dict[Worker, tuple[int, int]] = {}
        self.given_up: dict[int, None] = {}
        """Exchanges of groups that a member has given up."""
        self._heard: dict[Worker, int] = {}
        """Highest number of a group that each worker had heard of when it came back to a restarted scheduler."""
        self._earlier = -1
        """Highest of these numbers; groups of this scheduler have higher ones."""

    def comes_back(self, worker: Worker, heard: int, now: float) -> None:
        """Note that ``worker`` is back, and has heard of groups up to the number ``heard`` of an earlier scheduler."""
        self._heard[worker], self._earlier = heard, max(self._earlier, heard)
        if self._in:
            self.due = min(self.due, now)

    def gives_up(self, sequence: int, now: float) -> None:
        """Note that a member has given up that exchange of a group."""
        self.given_up[sequence] = None
        if len(self.given_up) > REMEMBERED:
            del self.given_up[next(iter(self.given_up))]
        self.due = min(self.due, now)

    def hear(self, worker: Worker, exchange: Exchanging | None, left: tuple[int, int], now: float) -> None:
        """Note that ``worker`` is in ``exchange``, and the numbers of the exchanges of a group and a barrier that it
        ``left`` last."""
        self._left[worker] = left
        if exchange is None:
            self._in.pop(worker, None)
        elif worker not in self._in or self._in[worker][0] != exchange:
            self._in[worker] = exchange, now
            soon = exchange.sequence in self.given_up or exchange.sequence <= self._earlier
            self.due = min(self.due, now if soon else now + self._limit)

    def forget(self, worker: Worker) -> None:
        """Forget ``worker``, which is gone."""
        self._in.pop(worker, None)
        self._left.pop(worker, None)
        self._heard.pop(worker, None)

    def look(self, now: float, here: Collection[Worker]) -> list[tuple[int, list[Worker]]]:
        """Return the numbers of stuck exchanges, and the workers in each; they are returned again when that does not
        help.

        Args:
            now: the time.
            here: workers that are not gone.
        """
        found: dict[tuple[int, int], list[Worker]] = {}
        for worker, (exchange, _) in self._in.items():
            found.setdefault((worker.stage, exchange.sequence), []).append(worker)
        stuck = []
        for (stage, sequence), inside in found.items():
            members = {Worker(stage, i) for worker in inside for i in self._in[worker][0].pipelines}
            others = [other for other in members.intersection(here) if other not in inside]
            begun = all(self._has_left(other, sequence) for other in others)
            unheard = any(self._heard.get(other, sequence) < sequence <= self._earlier for other in others)
            since = max(self._in[worker][1] for worker in inside)
            if sequence in self.given_up or unheard or (begun and now - since >= self._limit):
                stuck.append((sequence, sorted(inside)))
                for worker in inside:
                    self._in[worker] = self._in[worker][0], now
        self.due = now + self._limit / 4 if self._in else math.inf
        return stuck

    def _has_left(self, worker: Worker, sequence: int) -> bool:
        return self._left.get(worker, (-1, -1))[sequence >= BARRIERS] >= sequence


class Reach:
    """The reachability of the pipelines of one run; ``pause`` is in seconds.

    When pipelines find no process group in common, an epoch of membership begins in which every worker tries to reach
    each other worker of its stage, and reports which it could not. Two pipelines that miss each other in several such
    epochs in a row cannot both stay: the one that most others miss goes, or the youngest of several. If that explains
    nothing, the youngest goes after some more epochs. It is let in again after a pause that doubles each time, since it
    would hold up the others again.
    """

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._missed: set[frozenset[int]] = set()
        """Pairs that miss each other in this epoch."""
        self._apart: dict[frozenset[int], int] = {}
        """Number of epochs in a row in which each pair missed each other."""
        self._in_vain = 0
        self._last = -math.inf
        self._transfers: Counter[int] = Counter()
        self._out: dict[int, tuple[float, float]] = {}
        """Time until which each pipeline is out, and the length of that pause."""

    def misses(self, pipeline: int, others: Iterable[int]) -> None:
        """Note that a worker of ``pipeline`` cannot reach the workers of ``others`` in this epoch."""
        self._missed |= {frozenset((pipeline, other)) for other in others}

    def found_none(
        self, pipelines: Sequence[int], members: Sequence[int], waited: bool, now: float
    ) -> tuple[int, list[int]] | None:
        """Decide on ``pipelines`` without a common process group: return the one that is put out, if any, and those it
        cannot reach.

        Args:
            pipelines: those that tried.
            members: those of the epoch, oldest first.
            waited: they waited for the process group of the epoch; else they had one, in which an exchange broke off.
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
        unlucky = max(candidates, key=lambda i: (missed_by[i], members.index(i)))
        self._in_vain, self._apart = 0, {}
        return unlucky, sorted({i for pair in pairs if unlucky in pair for i in pair} - {unlucky})

    def got_none(self, pipeline: int, now: float) -> None:
        """Note that the newcomer ``pipeline`` did not get the state of a member."""
        self._transfers[pipeline] += 1
        if self._transfers[pipeline] % TRANSFERS == 0:
            self.put_out(pipeline, now)

    def has_come(self, pipeline: int) -> None:
        """Note that the newcomer ``pipeline`` has got the state of a member."""
        del self._transfers[pipeline]

    def put_out(self, pipeline: int, now: float) -> None:
        """Keep ``pipeline`` out for a while."""
        _, before = self._out.get(pipeline, (0.0, self._pause / 2))
        pause = min(2 * before, LONGEST_PAUSE)
        self._out[pipeline] = now + pause, pause

    def let_in(self, now: float) -> None:
        """Let in the pipelines whose pause is over."""
        for pipeline, (until, pause) in self._out.items():
            if until <= now:
                self._out[pipeline] = -math.inf, pause

    def out_until(self, pipeline: int) -> float:
        """Return when ``pipeline`` may be let in; −∞ if it is not out, which :meth:`let_in` updates."""
        return self._out.get(pipeline, (-math.inf, 0.0))[0]
