"""The waiting time T of one stage, adapted per worker (SDPipe §4, "Scheduler").

A worker's window is doubled, up to the maximum, when the group it opened came out too small, and multiplied
by 0.9 otherwise. It is kept as a fraction of the maximum, so that T = 0 and T = ∞ stay exactly 0 and ∞ and a
maximum that is measured may move. Fractions start at 1: workers start together, so long windows end early
("everybody came") and cost nothing, whereas starting short would cut the first groups to pieces. They end at
1/64: a worker that was in full company for long gets its maximum back within six small groups.
"""

from __future__ import annotations

from typing import Literal

SMALLEST_FRACTION = 1 / 64
GROW = 2.0
SHRINK = 0.9

UNMEASURED = 0.05
"""Seconds to wait at most with ``"auto"`` while no iteration has been measured; finite, so that no stage can
wait for workers that depend on it."""

SMOOTHING = 0.1
"""Weight of a new iteration time in the running mean: about the last ten iterations of the stage count."""


class AdaptiveWindow:
    """How long the group that a worker opens may wait for company."""

    def __init__(self, maximum: float | Literal["auto"], num_workers: int) -> None:
        self._maximum = maximum
        self._num_workers = num_workers
        self._fractions = [1.0] * num_workers
        self._iteration_time: float | None = None
        self._released_at: dict[int, float] = {}

    def length(self, worker: int) -> float:
        """The window of ``worker``, in seconds."""
        maximum = self._maximum
        return self._fractions[worker] * (self.maximum if isinstance(maximum, str) else maximum)

    @property
    def maximum(self) -> float:
        """The bound on T: as given, or 1/N of the measured iteration time."""
        if not isinstance(self._maximum, str):
            return self._maximum
        return UNMEASURED if self._iteration_time is None else self._iteration_time / self._num_workers

    def adapt(self, worker: int, came_out_small: bool) -> None:
        """The group that ``worker`` opened has closed."""
        fraction = self._fractions[worker] * (GROW if came_out_small else SHRINK)
        if fraction > 1.0:
            fraction = 1.0
        elif fraction < SMALLEST_FRACTION:
            fraction = SMALLEST_FRACTION
        self._fractions[worker] = fraction

    def answered(self, worker: int, now: float) -> None:
        """``worker`` got a group and computes from now on."""
        self._released_at[worker] = now

    def arrived(self, worker: int, now: float) -> None:
        """``worker`` is ready again: the time since its last group is one iteration without the waiting."""
        since = self._released_at.pop(worker, None)
        if since is not None:
            mean = self._iteration_time
            self._iteration_time = now - since if mean is None else mean + SMOOTHING * (now - since - mean)

    def paused(self, worker: int) -> None:
        """``worker`` left: the time until it returns is no iteration."""
        self._released_at.pop(worker, None)
