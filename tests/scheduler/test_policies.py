"""What every policy keeps, whatever happens: Hypothesis plays the workers."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from policy_simulation import NaiveSyncGraph, Pipelines, brief, join_all, random_durations

from lightning_sdpipe.scheduler.ad_psgd import ADPSGDPolicy, AsynchronousADPSGDPolicy, matching
from lightning_sdpipe.scheduler.local_sgd import LocalSGDPolicy
from lightning_sdpipe.scheduler.policy import Group, Reason, RefusedEvent, Worker
from lightning_sdpipe.scheduler.semi_decentralized import SemiDecentralizedPolicy
from lightning_sdpipe.scheduler.specification import (
    ADPSGDSpec,
    AllReduceSpec,
    LocalSGDSpec,
    NoSyncSpec,
    PolicySpec,
    SemiDecentralizedSpec,
    build,
)

W = Worker

semi_decentralized = st.builds(
    SemiDecentralizedSpec,
    window=st.sampled_from([0.0, 0.5, 2.0, "auto"]),
    connectivity=st.sampled_from([1, 2, 3, 5, None]),
    min_group=st.sampled_from([1, 2]),
    max_group=st.sampled_from([None, 2, 3]),
)
specs = st.one_of(
    semi_decentralized,
    st.sampled_from(
        [
            SemiDecentralizedSpec(window=math.inf),
            AllReduceSpec(),
            LocalSGDSpec(every=3),
            NoSyncSpec(),
            ADPSGDSpec(seed=1),
            ADPSGDSpec(asynchronous=True),
        ]
    ),
)


class AnyPolicy(RuleBasedStateMachine):
    """Workers join, report, repeat themselves, skip iterations, fall silent and come back, in any order."""

    @initialize(spec=specs, stages=st.integers(1, 3), pipelines=st.integers(1, 6))
    def start(self, spec: PolicySpec, stages: int, pipelines: int) -> None:
        self.spec, self.stages, self.pipelines = spec, stages, pipelines
        self.policy = build(spec, stages, pipelines)
        self.now = 0.0
        self.active: set[Worker] = set()
        self.waiting: dict[Worker, int] = {}
        self.iteration: dict[Worker, int] = {}
        self.last_sequence = -1
        connectivity = getattr(spec, "connectivity", None)
        self.graphs = [NaiveSyncGraph(connectivity) if connectivity else None for _ in range(stages)]

    def worker(self, data: st.DataObject) -> Worker:
        return W(
            data.draw(st.integers(0, self.stages - 1), label="stage"),
            data.draw(st.integers(0, self.pipelines - 1), label="pipeline"),
        )

    def settle(self, groups: list[Group]) -> None:
        batches: dict[tuple[int, Reason], list[list[int]]] = {}
        for group in groups:
            assert group.sequence == self.last_sequence + 1
            self.last_sequence = group.sequence
            assert list(group.members) == sorted(set(group.members))
            assert {member.stage for member in group.members} == {group.stage}
            assert len(group.weights) == len(group.members)
            assert sum(group.weights) == pytest.approx(1.0)
            for member in group.members:
                assert member in self.active
                if member not in group.passive:
                    self.iteration[member] = self.waiting.pop(member)
            pipelines = [member.pipeline for member in group.members]
            batches.setdefault((group.stage, group.reason), []).append(pipelines)
        for (stage, reason), batch in batches.items():
            graph = self.graphs[stage]
            if graph is None:
                continue
            connected = len(graph.components(batch)) == 1
            assert connected == (reason is not Reason.TOKEN_BUSY)
            graph.record(batch)

    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        worker = self.worker(data)
        if worker in self.active:
            with pytest.raises(RefusedEvent):
                self.policy.join(worker, self.now)
            return
        # Groups of a window that has just ended do not know the newcomer yet.
        self.settle(self.policy.tick(self.now))
        self.active.add(worker)
        self.iteration[worker] = -1
        graph = self.graphs[worker.stage]
        if graph is not None:
            graph.join(worker.pipeline)
        self.settle(self.policy.join(worker, self.now))

    @rule(data=st.data())
    def leave_or_fall_silent(self, data: st.DataObject) -> None:
        worker = self.worker(data)
        if worker not in self.active:
            with pytest.raises(RefusedEvent):
                self.policy.leave(worker, self.now)
            return
        self.settle(self.policy.tick(self.now))
        self.active.remove(worker)
        self.waiting.pop(worker, None)
        graph = self.graphs[worker.stage]
        if graph is not None:
            graph.leave(worker.pipeline)
        self.settle(self.policy.leave(worker, self.now))

    @rule(data=st.data(), step=st.sampled_from([1, 1, 1, 1, 2, 0, -1]))
    def report(self, data: st.DataObject, step: int) -> None:
        """Steps that are not positive are duplicates and latecomers."""
        worker = self.worker(data)
        iteration = self.iteration.get(worker, -1) + step
        if worker not in self.active or worker in self.waiting or iteration <= self.iteration[worker]:
            before = self.policy.deadline()
            with pytest.raises(RefusedEvent):
                self.policy.ready(worker, iteration, self.now)
            assert self.policy.deadline() == before
            return
        self.waiting[worker] = iteration
        self.settle(self.policy.ready(worker, iteration, self.now))

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 1.9, 3.0]))
    def pass_time(self, seconds: float) -> None:
        due = self.policy.deadline()
        if due is not None and due <= self.now + seconds:
            self.now = max(self.now, due)
        else:
            self.now += seconds
        self.settle(self.policy.tick(self.now))

    @invariant()
    def nobody_waits_without_a_reason(self) -> None:
        """If no clock will bring an answer, an active worker is still to come, and one stage enforces."""
        if not hasattr(self, "policy") or self.policy.deadline() is not None:
            return
        stages = {worker.stage for worker in self.waiting}
        for stage in stages:
            assert any(w.stage == stage for w in self.active - set(self.waiting))
        finite = isinstance(self.spec, SemiDecentralizedSpec) and self.spec.window != math.inf
        assert not finite or len(stages) <= 1

    def teardown(self) -> None:
        """Once all that are active have reported and the windows have ended, all are answered."""
        if not hasattr(self, "policy"):
            return
        for _ in range(1000):
            stages = {worker.stage for worker in self.waiting}
            free = [w for w in self.active - set(self.waiting) if w.stage in stages]
            if free:
                # The one furthest behind comes next, as it would in a pipeline.
                worker = min(free, key=lambda w: (self.iteration[w], w))
                self.waiting[worker] = self.iteration[worker] + 1
                self.settle(self.policy.ready(worker, self.waiting[worker], self.now))
            due = self.policy.deadline()
            if due is not None:
                self.now = max(self.now, due)
                self.settle(self.policy.tick(self.now))
            if not self.waiting:
                return
        raise AssertionError(f"never answered: {sorted(self.waiting)}")


TestAnyPolicy = AnyPolicy.TestCase
TestAnyPolicy.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@settings(max_examples=50, deadline=None)
@given(
    spec=st.sampled_from([LocalSGDSpec(every=3), NoSyncSpec(), ADPSGDSpec(seed=3), ADPSGDSpec(asynchronous=True)]),
    stages=st.integers(1, 8),
    pipelines=st.integers(2, 64),
    asynchronous=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_pipelines_never_get_stuck(
    spec: PolicySpec, stages: int, pipelines: int, asynchronous: bool, seed: int
) -> None:
    iterations = max(3, min(20, 2000 // (stages * pipelines)))
    policy = build(spec, stages, pipelines)
    lead = stages if asynchronous else 1
    run = Pipelines(policy, stages, pipelines, iterations, random_durations(seed), lead)
    run.run()
    assert run.stuck == []


def test_local_sgd_averages_every_third_iteration_only() -> None:
    run = Pipelines(LocalSGDPolicy(2, 3, every=3), 2, 3, 9, random_durations(0))
    run.run()
    sizes = [len(group.members) for _, group in run.groups if group.stage == 0]
    assert sorted(sizes) == [1] * 18 + [3] * 3
    assert {group.reason for _, group in run.groups} == {Reason.LOCAL_STEP, Reason.EVERYBODY_CAME}


def test_a_pair_goes_out_when_both_have_come() -> None:
    policy = ADPSGDPolicy(1, 4, seed=0)
    join_all(policy, 1, 4)
    partner = matching(4, 0, 0)[0]
    others = sorted({1, 2, 3} - {partner})
    assert policy.ready(W(0, 0), 0, 0.0) == []
    assert policy.ready(W(0, others[0]), 0, 1.0) == []
    assert brief(policy.ready(W(0, partner), 0, 2.0)) == [(0, (0, partner), Reason.MATCHED)]
    assert brief(policy.leave(W(0, others[1]), 3.0)) == [(0, (others[0],), Reason.WORKER_LOST)]


def test_nobody_waits_for_a_partner_that_is_past_that_iteration() -> None:
    policy = ADPSGDPolicy(1, 2, seed=0)
    join_all(policy, 1, 2)
    assert policy.ready(W(0, 0), 0, 0.0) == []
    groups = policy.ready(W(0, 1), 5, 1.0)
    assert brief(groups) == [(0, (0,), Reason.LOCAL_STEP)]
    assert policy.ready(W(0, 0), 3, 2.0) != []


@given(n=st.integers(1, 65), seed=st.integers(0, 5), iteration=st.integers(0, 10**6))
def test_a_matching_is_perfect_and_always_the_same(n: int, seed: int, iteration: int) -> None:
    partners = matching(n, seed, iteration)
    assert all(partners[partners[i]] == i for i in range(n))
    assert sum(partners[i] == i for i in range(n)) == n % 2
    assert matching.__wrapped__(n, seed, iteration) == partners


def test_an_asynchronous_neighbour_is_drawn_among_the_active_and_not_waited_for() -> None:
    policy = AsynchronousADPSGDPolicy(1, 4, rng=random.Random(0))
    join_all(policy, 1, 4)
    policy.leave(W(0, 2), 0.0)
    drawn = set()
    for k in range(50):
        (group,) = policy.ready(W(0, 1), k, 0.0)
        (neighbour,) = group.passive
        assert set(group.members) == {W(0, 1), neighbour}
        drawn.add(neighbour.pipeline)
    assert drawn == {0, 3}


def test_the_window_must_be_finite_for_enforcement_to_matter() -> None:
    policy = SemiDecentralizedPolicy(1, 2, window=math.inf, connectivity=1)
    join_all(policy, 1, 2)
    assert policy.ready(W(0, 0), 0, 0.0) == []
    assert policy.tick(1e12) == []
    assert policy.token_holder is None
