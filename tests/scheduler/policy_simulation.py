"""Helpers of the policy tests: short ways to script events, and pipelines under a virtual clock."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import networkx as nx

from lightning_sdpipe.policies import Group, Joined, Left, Policy, Ready, Tick, Worker

Summary = tuple[int, tuple[int, ...], str]


def brief(groups: list[Group]) -> list[Summary]:
    """Stage, pipelines and reason of each group."""
    return [(g.stage, tuple(w.pipeline for w in g.members), g.reason) for g in groups]


def join_all(policy: Policy, num_stages: int, num_pipelines: int, now: float = 0.0) -> None:
    for stage in range(num_stages):
        for pipeline in range(num_pipelines):
            assert policy.on(Joined(Worker(stage, pipeline)), now) == []


class Pipelines:
    """``num_pipelines`` × ``num_stages`` workers that compute, report and wait as real ones do.

    Worker (j, i) starts iteration k once it has the group of its k - 1 and, ``lead`` iterations ago, every
    stage of its pipeline had its group too: ``lead`` 1 is a pipeline with flush, M is PipeDream. It reports k
    after its own compute time, and not before the next stage of its pipeline has reported k: the backward
    pass comes from there. It leaves after its last iteration.
    """

    def __init__(
        self,
        policy: Policy,
        num_stages: int,
        num_pipelines: int,
        iterations: int,
        duration: Callable[[Worker, int], float],
        lead: int = 1,
    ) -> None:
        self.policy = policy
        self.workers = [Worker(j, i) for j in range(num_stages) for i in range(num_pipelines)]
        self.num_stages, self.iterations, self.duration, self.lead = num_stages, iterations, duration, lead
        self.answered = dict.fromkeys(self.workers, 0)
        self.reported = dict.fromkeys(self.workers, 0)
        self.computed = dict.fromkeys(self.workers, 0)
        self.groups: list[tuple[float, Group]] = []
        self.check: Callable[[Group], None] = lambda group: None
        self._started = dict.fromkeys(self.workers, 0)
        self._queue: list[tuple[float, int, Worker]] = []
        self._pushed = 0
        self.now = 0.0
        join_all(policy, num_stages, num_pipelines)

    def run(self) -> None:
        """Until nothing can happen any more; whoever is not done then is stuck for ever."""
        for worker in self.workers:
            self._start(worker)
        while True:
            due = self.policy.deadline()
            if self._queue and (due is None or self._queue[0][0] < due):
                self.now, _, worker = heapq.heappop(self._queue)
                self.computed[worker] += 1
                self._report(worker)
            elif due is not None:
                self.now = max(self.now, due)
                self._deliver(self.policy.on(Tick(), self.now))
            else:
                return

    def _start(self, worker: Worker) -> None:
        k = self._started[worker]
        if k == self.iterations or k != self.answered[worker]:
            return
        stages = [self.answered[Worker(j, worker.pipeline)] for j in range(self.num_stages)]
        if min(stages) + self.lead <= k:
            return
        self._started[worker] += 1
        self._pushed += 1
        heapq.heappush(self._queue, (self.now + self.duration(worker, k), self._pushed, worker))

    def _report(self, worker: Worker) -> None:
        later = Worker(worker.stage + 1, worker.pipeline)
        k = self.reported[worker] + 1
        if self.computed[worker] < k or (later in self.reported and self.reported[later] < k):
            return
        self.reported[worker] = k
        groups = self.policy.on(Ready(worker, k), self.now)
        earlier = Worker(worker.stage - 1, worker.pipeline)
        if earlier in self.reported:
            self._report(earlier)
        self._deliver(groups)

    def _deliver(self, groups: list[Group]) -> None:
        for group in groups:
            self.check(group)
            self.groups.append((self.now, group))
            for worker in set(group.members) - set(group.passive):
                self.answered[worker] += 1
                assert self.answered[worker] == self.reported[worker]
        for group in groups:
            for worker in group.members:
                if worker in group.passive:
                    continue
                if self.answered[worker] == self.iterations:
                    self._deliver(self.policy.on(Left(worker), self.now))
                for j in range(self.num_stages):
                    self._start(Worker(j, worker.pipeline))

    @property
    def stuck(self) -> list[Worker]:
        return [worker for worker in self.workers if self.answered[worker] < self.iterations]


def random_durations(seed: int, delay: float = 3.0, probability: float = 0.1) -> Callable[[Worker, int], float]:
    """About 1 s per iteration, with the paper's kind of stragglers."""
    rng = random.Random(seed)

    def duration(worker: Worker, iteration: int) -> float:
        return rng.uniform(0.9, 1.1) + (delay if rng.random() < probability else 0.0)

    return duration


class NaiveSyncGraph:
    """The promise of sync_graph.py, written down as it reads: no forest, networkx on the whole window."""

    def __init__(self, rounds: int, unit: str = "rounds") -> None:
        self.rounds, self.unit, self.round, self.signals = rounds, unit, 0, 0
        self.active: set[int] = set()
        self.known: set[int] = set()
        self.met: list[tuple[int, list[int], int | None]] = []
        self.entrants: list[int] | None = None

    def join(self, worker: int) -> None:
        if worker not in self.known:
            self.known.add(worker)
            if self.entrants is None or not self.active:
                self.entrants = [min(self.active)] if self.active else []
                self.met.append((self.round - 1, self.entrants, None))
            self.entrants.append(worker)
        self.active.add(worker)

    def leave(self, worker: int) -> None:
        self.active.remove(worker)
        self.signals = min(self.signals, max(0, len(self.active) - 1))

    def record(self, groups: list[Group]) -> None:
        """Groups that went out together."""
        self.entrants = None
        for group in groups:
            self.met.append((self.round, [worker.pipeline for worker in group.members], group.sequence))
            self.signals += len(group.members)
        if self.unit == "groups":
            self.round += 1
            return
        while self.signals >= len(self.active):
            self.signals -= len(self.active)
            self.round += 1

    def forget(self, sequence: int) -> None:
        """That group broke."""
        self.met = [entry for entry in self.met if entry[2] != sequence]

    def components(self, candidate: list[Group] | None = None, since: int | None = None) -> set[frozenset[int]]:
        """Of the last rounds, or those from ``since`` on, the current one and ``candidate`` included."""
        graph = nx.Graph()
        graph.add_nodes_from(self.active)
        first = self.round - self.rounds + 1 if since is None else since
        recent = [members for made, members, _ in self.met if made >= first]
        for members in recent + [[worker.pipeline for worker in group.members] for group in candidate or []]:
            present = [worker for worker in members if worker in self.active]
            graph.add_edges_from((u, v) for u in present for v in present)
        return {frozenset(component) for component in nx.connected_components(graph)}
