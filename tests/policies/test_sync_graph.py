"""The sync-graph against a naive one that asks networkx about the whole window."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.policies.policy import Unit
from lightning_sdpipe.policies.sync_graph import (
    SyncGraph,
    components,
    rounds_since_connected,
    rounds_since_met,
    spectral_radius,
)
from tests.policies.scripted import NaiveSyncGraph

N = 7


def met(*parts: list[int], first: int = 0) -> list[Group]:
    """Groups of one stage, numbered from ``first`` on."""
    return [
        Group(tuple(Worker(0, i) for i in sorted(part)), (1 / len(part),) * len(part), first + number, "test")
        for number, part in enumerate(parts)
    ]


def assert_same_components(real: SyncGraph, naive: NaiveSyncGraph) -> None:
    found: dict[int, set[int]] = {}
    for worker in naive.active:
        found.setdefault(real.component(worker), set()).add(worker)
    assert {frozenset(component) for component in found.values()} == naive.components()
    assert real.components == len(found)


class SyncGraphAgainstNaive(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.real: SyncGraph | None = None
        self.recorded = 0

    @precondition(lambda self: self.real is None)
    @rule(
        rounds=st.integers(1, 5),
        unit=st.sampled_from(["rounds", "groups"]),
        members=st.sets(st.integers(0, N - 1), min_size=1),
    )
    def start(self, rounds: int, unit: Unit, members: set[int]) -> None:
        self.real, self.naive = SyncGraph(rounds, unit), NaiveSyncGraph(rounds, unit)
        for worker in sorted(members):
            self.real.join(worker)
            self.naive.join(worker)

    @precondition(lambda self: self.real is not None)
    @rule(data=st.data())
    def record(self, data: st.DataObject) -> None:
        assert self.real is not None
        if not self.naive.active:
            return
        order = data.draw(st.permutations(sorted(self.naive.active)))
        cuts = sorted(data.draw(st.sets(st.integers(1, len(order)), min_size=1, max_size=3)))
        parts = [list(order[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
        groups = met(*parts, first=self.recorded)
        self.recorded += len(parts)
        self.real.record(groups)
        self.naive.record(groups)

    @precondition(lambda self: self.real is not None)
    @rule(worker=st.integers(0, N - 1))
    def forget_last(self, worker: int) -> None:
        assert self.real is not None
        self.real.forget_last(worker)
        self.naive.forget_last(worker)

    @precondition(lambda self: self.real is not None)
    @rule(worker=st.integers(0, N - 1))
    def join_or_leave(self, worker: int) -> None:
        assert self.real is not None
        if worker in self.naive.active:
            self.real.leave(worker)
            self.naive.leave(worker)
        else:
            self.real.join(worker)
            self.naive.join(worker)

    @invariant()
    def same_components(self) -> None:
        if self.real is None:
            return
        assert_same_components(self.real, self.naive)
        assert self.real.round == self.naive.round
        since = [r for r in range(self.real.rounds) if len(self.naive.components(since=self.real.round - r)) <= 1]
        assert rounds_since_connected(self.real.meetings(), self.real.active, self.real.round) == min(
            since, default=None
        )
        assert {frozenset(c) for c in components(self.real.meetings(), self.real.active)} == self.naive.components()


TestSyncGraph = SyncGraphAgainstNaive.TestCase
TestSyncGraph.settings = settings(
    max_examples=settings.default.max_examples // 2, stateful_step_count=40, deadline=None
)


def graph_of(groups: list[list[int]], workers: int, rounds: int = 100) -> SyncGraph:
    graph = SyncGraph(rounds)
    for worker in range(workers):
        graph.join(worker)
    for group in groups:
        graph.record(met(group))
    return graph


def test_rho_is_that_of_the_groups_in_the_window() -> None:
    graph = graph_of([[0, 1], [1, 2], [0, 2]], 3)
    assert spectral_radius(graph.meetings(), graph.active) == pytest.approx(0.5), "first joins are no groups"
    graph.leave(2)
    assert spectral_radius(graph.meetings(), graph.active) == pytest.approx(2 / 3)


def test_the_graph_can_be_looked_at() -> None:
    graph = graph_of([[0, 1], [2, 3], [0, 1], [1, 2]], 5, rounds=4)
    graph.leave(3)
    assert graph.round == 1
    assert components(graph.meetings(), graph.active) == [{0, 1, 2, 4}], "all count as having met just before the start"
    assert [(made, members) for made, members, group in graph.meetings() if group] == [
        (0, [0, 1]),
        (0, [2, 3]),
        (0, [0, 1]),
        (1, [1, 2]),
    ]
    assert rounds_since_met(graph.meetings(), graph.round) == {(0, 1): 1, (2, 3): 1, (1, 2): 0}
    for _ in range(8):
        graph.record(met([0, 1]))
    assert components(graph.meetings(), graph.active) == [{0, 1}, {2}, {4}]


@pytest.mark.parametrize(("unit", "rounds"), [("rounds", 3), ("groups", 40)])
def test_those_that_leave_one_after_the_other_while_others_meet(unit: Unit, rounds: int) -> None:
    size, chance = 48, random.Random(3)
    real, naive = SyncGraph(rounds, unit), NaiveSyncGraph(rounds, unit)
    for worker in range(size):
        real.join(worker)
        naive.join(worker)
    recorded = 0
    while naive.active:
        for _ in range(chance.randrange(len(naive.active))):
            groups = met(chance.sample(sorted(naive.active), min(len(naive.active), chance.choice([1, 2, 4]))))
            groups = [msgspec.structs.replace(group, sequence=recorded) for group in groups]
            real.record(groups)
            naive.record(groups)
            recorded += 1
        assert_same_components(real, naive)
        gone = chance.choice(sorted(naive.active))
        real.leave(gone)
        naive.leave(gone)
