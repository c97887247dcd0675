"""Helpers of the policy tests: short ways to script events, and the sync-graph as its promise reads."""

from __future__ import annotations

from typing import Any

import networkx as nx

from lightning_sdpipe.heterogeneity import Delays
from lightning_sdpipe.policies import Group, Joined, Policy, Ready, Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.simulate import Work, jittered

Summary = tuple[int, tuple[int, ...], str]


def brief(groups: list[Group]) -> list[Summary]:
    """Stage, pipelines and reason of each group."""
    return [(g.stage, tuple(w.pipeline for w in g.members), g.reason) for g in groups]


def ready(policy: Policy, *pipelines: int, iteration: int = 0, now: float = 0.0, stage: int = 0) -> list[Group]:
    """What a policy decides as these come, one after the other, at one time."""
    return [group for i in pipelines for group in policy.on(Ready(Worker(stage, i), iteration), now)]


def join_all(policy: Policy, num_stages: int, num_pipelines: int, now: float = 0.0) -> None:
    for stage in range(num_stages):
        for pipeline in range(num_pipelines):
            assert policy.on(Joined(Worker(stage, pipeline)), now) == []


def joined(kind: type[PolicyConfig], num_stages: int, num_pipelines: int, **values: object) -> Any:
    """A policy of these values, of which all workers have joined."""
    policy = kind(**values).make_policy(num_stages, num_pipelines)
    join_all(policy, num_stages, num_pipelines)
    return policy


def straggling(
    num_stages: int,
    num_pipelines: int,
    iterations: int,
    seed: int,
    asynchronous: bool = False,
    delay: float = 3.0,
    probability: float = 0.1,
) -> Work:
    """About 1 s per iteration, with stragglers as in the paper's artefact: before each forward and each backward."""
    return Work(
        num_stages,
        num_pipelines,
        iterations,
        jittered(1.0, 0.1, seed),
        "pipedream" if asynchronous else "1f1b",
        num_micro_batches=1,
        heterogeneity=Delays(probability, delay, "pass", seed=seed),
    )


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

    def forget_last(self, worker: int) -> None:
        """It was lost, and its last group may have broken off."""
        groups = [entry for entry in self.met if entry[2] is not None and worker in entry[1]]
        if groups:
            self.met.remove(groups[-1])

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
