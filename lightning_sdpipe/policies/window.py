"""The waiting time T of one stage, adapted to the workers' pattern (SDPipe §4, "Scheduler").

**A given window** is adapted per worker. It is doubled, up to the maximum, when the group it opened came out too small,
and multiplied by 0.9 otherwise. It is kept as a fraction of the maximum, so that T = 0 and T = ∞ stay exactly 0 and ∞.
With ``"paper"`` the maximum is 1/N of the measured iteration time (§5, "Experimental Setting"). Fractions start at 1:
workers start together, so long windows end early ("everybody came") and cost nothing, whereas starting short would cut
the first groups to pieces. They never fall below 1/64, so a worker that was in full groups for long gets its maximum
back within six small ones.

**An automatic window** ends when the last worker that is expected within a quarter of the opener's own iteration should
have come; if none is expected, it is empty. Looking farther ahead, fast devices would spend most of the time waiting
for slow ones, with which they cannot stay in step; looking less far, groups would connect the stage so slowly that more
is lost in enforcing connectivity, which waits for a straggler's whole delay. A slow device waits longer, since that
costs it no larger part of its time, and so meets the fast ones nearly every time: a device four times as slow may wait
for one of their whole iterations. With many workers one is always about to come, so beyond 16 it looks only 1/√N ahead.
A worker is expected one iteration, the stage's median, after its last group; a late one is a straggler, which is not
waited for. Two pipelines out of step show why a fixed length would not do: each waits its T in vain, both fall back by
T, and they never meet. With expected arrivals, the one that comes shortly before the other waits and the other does
not, so they meet at once; if they are farther apart, the next enforced group brings them together.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Literal

SMALLEST_FRACTION = 1 / 64
GROW = 2.0
SHRINK = 0.9

HORIZON = 0.25
"""Largest distance, in iterations of the worker that opens it, that an automatic window looks ahead. It is less than
half of one, so that of two workers out of step only one waits."""

SLACK = 1 / 6
"""How late an expected worker may be, as a part of the horizon."""

UNMEASURED = 0.05
"""Largest wait in seconds while no iteration has been measured; finite, so that no stage can wait for workers that
depend on it."""

Length = float | Literal["auto", "paper"]
"""Length of a window: seconds, or a rule."""

MEMORY = 31
"""Number of iteration times of the stage that are remembered; their median is the pattern, which stragglers do not
move."""

OWN_MEMORY = 5
"""Number of iteration times of each worker that are remembered; the shortest is its own, free of what held it up."""


class AdaptiveWindow:
    """How long the group that a worker opens may wait for more members.

    Args:
        maximum: in seconds, or "auto", or "paper".
        num_workers: N, the workers of the stage.
    """

    def __init__(self, maximum: Length, num_workers: int) -> None:
        self._maximum = maximum
        self._num_workers = num_workers
        self._horizon = min(1.0 / math.sqrt(num_workers), HORIZON)
        self._fractions = [1.0] * num_workers
        self._iteration_time: float | None = None
        self._recent: deque[float] = deque(maxlen=MEMORY)
        self._sorted: list[float] = []
        self._own: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=OWN_MEMORY))
        self._released_at: dict[int, float] = {}
        self._expected: dict[int, float] = {}
        """Workers of ``_released_at`` that are not late, in the order of their release and so of their arrival."""

    def widen(self, num_workers: int) -> None:
        """Allow ``num_workers`` workers from now on. The horizon stays: it depends on the planned number."""
        self._fractions += [1.0] * (num_workers - len(self._fractions))

    def length(self, worker: int, now: float) -> float:
        """Return the length in seconds of the window that ``worker`` opens by arriving now."""
        if self._maximum == "auto":
            return self._until_the_expected_came(worker, now)
        if self._maximum == "paper":
            measured = self._iteration_time
            longest = UNMEASURED if measured is None else measured / self._num_workers
            return self._fractions[worker] * longest
        return self._fractions[worker] * self._maximum

    def _until_the_expected_came(self, worker: int, now: float) -> float:
        if self._iteration_time is None:
            return UNMEASURED
        horizon = self._horizon * min(self._own[worker], default=self._iteration_time)
        slack = SLACK * horizon
        length, late = 0.0, []
        for other, released_at in self._expected.items():
            wait = released_at + self._iteration_time - now
            if wait > horizon:
                break
            if wait < -slack:
                late.append(other)
            else:
                length = max(wait, 0.0) + slack
        for other in late:  # each is looked at once: near-constant time per signal
            del self._expected[other]
        return length

    def adapt(self, worker: int, came_out_small: bool) -> None:
        """Adapt the window of ``worker``, whose group has closed."""
        fraction = self._fractions[worker] * (GROW if came_out_small else SHRINK)
        if fraction > 1.0:
            fraction = 1.0
        elif fraction < SMALLEST_FRACTION:
            fraction = SMALLEST_FRACTION
        self._fractions[worker] = fraction

    def answered(self, workers: Iterable[int], now: float) -> None:
        """Note that ``workers`` got a group and compute from now on."""
        for worker in workers:
            self._released_at[worker] = now
            self._expected.pop(worker, None)
            self._expected[worker] = now

    def arrived(self, worker: int, now: float) -> None:
        """Note that ``worker`` is ready again: the time since its last group is one iteration without the waiting."""
        since = self._released_at.pop(worker, None)
        self._expected.pop(worker, None)
        if since is not None:
            taken = now - since
            if len(self._recent) == MEMORY:
                self._sorted.remove(self._recent[0])
            self._recent.append(taken)  # forgets the oldest
            insort(self._sorted, taken)
            self._own[worker].append(taken)
            self._iteration_time = self._sorted[(len(self._sorted) - 1) // 2]

    def paused(self, worker: int) -> None:
        """Note that ``worker`` left: the time until it returns is not an iteration."""
        self._released_at.pop(worker, None)
        self._expected.pop(worker, None)
