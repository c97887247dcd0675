"""Which groups the real policy would form among pipelines of given speeds, and what averaging in them costs.

DT-FM's data cost is that of everybody averaging with everybody. SDPipe averages in groups of those that are ready at
about the same time, so which devices meet depends on their speeds: the policy itself decides, under a virtual clock.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_sdpipe.scheduler.policy import Group, Worker
from lightning_sdpipe.scheduler.specification import PolicySpec, build

ITERATIONS, WARM_UP = 240, 40
"""Of each pipeline, and how many do not count: until P rounds have passed, nothing is enforced."""

JITTER = 0.05
"""An iteration takes up to so much more or less than usual: nothing ever takes exactly as long twice."""


@dataclass(frozen=True)
class Drawn:
    """What one stage did.

    Args:
        groups: pipelines that averaged together, in the order in which they did.
        rate: mini-batches per second of all pipelines.
        efficiency: the rate over that of pipelines that never wait for each other and never average (η).
        seconds: that averaging in a group took, the mean over those who took part.
    """

    groups: tuple[tuple[int, ...], ...]
    rate: float
    efficiency: float
    seconds: float


def draw(
    policy: PolicySpec, times: Sequence[float], averaging: Callable[[Sequence[int]], float], seed: int = 0
) -> Drawn:
    """Lets the policy form groups in one stage.

    Args:
        policy: what forms them.
        times: seconds for a mini-batch of each pipeline; above 0.
        averaging: seconds that a group of these pipelines takes to average.
        seed: of the jitter.
    """
    replicas = _Replicas(policy, times, averaging, random.Random(seed))
    replicas.run()
    counted = ITERATIONS - WARM_UP
    rate = sum(counted / (end - begin) for begin, end in zip(replicas.began, replicas.ended, strict=True))
    alone = sum(counted / seconds for seconds in replicas.alone)
    members = sum(map(len, replicas.groups))
    spent = sum(len(group) * seconds for group, seconds in zip(replicas.groups, replicas.spent, strict=True))
    return Drawn(tuple(replicas.groups), rate, rate / alone, spent / members if members else 0.0)


class _Replicas:
    """The replicas of a stage: each computes, is ready, waits for its group, averages, and begins again."""

    def __init__(
        self,
        policy: PolicySpec,
        times: Sequence[float],
        averaging: Callable[[Sequence[int]], float],
        rng: random.Random,
    ) -> None:
        self._policy, self._times, self._averaging, self._rng = build(policy, 1, len(times)), times, averaging, rng
        self._queue: list[tuple[float, int]] = []  # when each is ready next
        self._done = [0] * len(times)
        self.groups: list[tuple[int, ...]] = []
        self.spent: list[float] = []
        self.began, self.ended, self.alone = ([0.0] * len(times) for _ in range(3))

    def run(self) -> None:
        """Until all have done all iterations."""
        for pipeline in range(len(self._times)):
            self._policy.join(Worker(0, pipeline), 0.0)
            self._compute(pipeline, 0.0)
        while self._queue:
            due = self._policy.deadline()
            if due is not None and due <= self._queue[0][0]:
                self._deliver(self._policy.tick(due), due)
                continue
            now, pipeline = heapq.heappop(self._queue)
            if self._done[pipeline] < ITERATIONS:
                formed = self._policy.ready(Worker(0, pipeline), self._done[pipeline] + 1, now)
            else:
                self.ended[pipeline] = now
                formed = self._policy.leave(Worker(0, pipeline), now)
            self._deliver(formed, now)

    def _compute(self, pipeline: int, now: float) -> None:
        seconds = 0.0
        if self._done[pipeline] == WARM_UP:
            self.began[pipeline] = now
        if self._done[pipeline] < ITERATIONS:
            seconds = self._times[pipeline] * self._rng.uniform(1 - JITTER, 1 + JITTER)
            self.alone[pipeline] += seconds if self._done[pipeline] >= WARM_UP else 0.0
        heapq.heappush(self._queue, (now + seconds, pipeline))

    def _deliver(self, formed: Sequence[Group], now: float) -> None:
        for group in formed:
            members = tuple(worker.pipeline for worker in group.members)
            seconds = self._averaging(members)
            if min(self._done[pipeline] for pipeline in members) >= WARM_UP:
                self.groups.append(members)
                self.spent.append(seconds)
            for pipeline in members:
                if Worker(0, pipeline) not in group.passive:
                    self._done[pipeline] += 1
                    self._compute(pipeline, now + seconds)
