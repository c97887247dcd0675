"""Finds pipelines that cannot reach each other, and decides which of them is put out.

When pipelines find no process group in common, an epoch of membership begins in which every worker tries to reach each
other worker of its stage, and reports which it could not. Two pipelines that miss each other in several such epochs in
a row cannot both stay: the one goes that most others miss, and of these the youngest. If that explains nothing, the
youngest goes after some more epochs. It is let in again after a pause that doubles each time, since it would hold up
the others again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

TRANSFERS = 3
"""Transfers in a row that a newcomer must miss to be put out, too."""
EPOCHS = 3
"""Epochs in a row in which two pipelines must miss each other."""
UNEXPLAINED = 8
"""Epochs in a row after which one is put out although no pipeline reports which others it misses."""
TRIED_FOR = 3.0
"""Seconds after which an epoch has shown which pipelines reach each other."""
IN_A_ROW = 15.0
"""Most seconds between two epochs in vain that count as consecutive."""
LONGEST_PAUSE = 3600.0


class Reach:
    """The reachability of the pipelines of one run; ``pause`` is in seconds."""

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
        """Let the pipelines in whose pause is over."""
        for pipeline, (until, pause) in self._out.items():
            if until <= now:
                self._out[pipeline] = -math.inf, pause

    def out_until(self, pipeline: int) -> float:
        """Return when ``pipeline`` is let in; never in the past, once :meth:`let_in` has been called."""
        return self._out.get(pipeline, (-math.inf, 0.0))[0]
