"""What every policy keeps, whatever happens: Hypothesis plays the workers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lightning_sdpipe.policies import (
    Decision,
    Event,
    Group,
    Joined,
    Left,
    Lost,
    Progress,
    Ready,
    Reason,
    RefusedEvent,
    Restarted,
    Tick,
    Worker,
)
from lightning_sdpipe.policies.ad_psgd import ADPSGD, ADPSGDPolicy, AsynchronousADPSGDPolicy, matching
from lightning_sdpipe.policies.all_reduce import AllPresent, AllReduceModels
from lightning_sdpipe.policies.built_in import POLICIES
from lightning_sdpipe.policies.decentralized import Decentralized
from lightning_sdpipe.policies.decisions import check_group
from lightning_sdpipe.policies.local_sgd import LocalSGD, LocalSGDPolicy, NoSync
from lightning_sdpipe.policies.outer_rounds import OuterRounds
from lightning_sdpipe.policies.pairing import uniform
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.registry import build
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.simulate import simulate
from tests.policies.scripted import NaiveSyncGraph, brief, join_all, straggling

W = Worker

semi_decentralized = st.builds(
    SemiDecentralized,
    window=st.sampled_from([0.0, 0.01, 0.5, 2.0, "auto", "paper"]),
    connectivity=st.sampled_from([1, 2, 3, 5, None]),
    max_group=st.sampled_from([None, 2, 3]),
    connectivity_unit=st.sampled_from(["rounds", "groups"]),
)
partial_reduce = st.builds(
    PartialReduce, group_size=st.integers(2, 4), decay=st.sampled_from([None, 0.5]), history=st.sampled_from([None, 5])
)
specs = st.one_of(
    semi_decentralized,
    partial_reduce,
    st.sampled_from(
        [
            SemiDecentralized(window=math.inf),
            SemiDecentralized(window=0.5, min_group=1),
            *(
                kind(**form)
                for kind in POLICIES
                if kind not in (PHDPSGD, AllPresent, OuterRounds)
                for form in kind.forms
            ),
            LocalSGD(every=3),
            ADPSGD(seed=1),
            OuterRounds(None),
            Decentralized("shift_one", every=2),
            Decentralized("random", seed=3),
            PHDPSGD(staleness=2),
            PHDPSGD(staleness=None, every=2, gamma=0.0),
            PHDPSGD(staleness=1, asynchronous=True),
        ]
    ),
)


class AnyPolicy(RuleBasedStateMachine):
    """Workers join, report, repeat themselves, skip iterations, fall silent and come back, in any order; pipelines have
    like stages, or ``unlike`` depths, and each is decided about as a whole."""

    @initialize(
        spec=specs,
        stages=st.integers(1, 3),
        pipelines=st.integers(1, 6),
        unlike=st.none() | st.lists(st.integers(1, 3), min_size=6, max_size=6),
    )
    def start(self, spec: PolicyConfig, stages: int, pipelines: int, unlike: list[int] | None) -> None:
        if isinstance(spec, PHDPSGD):
            stages = 1  # stages before the last wait for it, which does not take part here: see test_phd_psgd.py
        if isinstance(spec, PartialReduce | OuterRounds):
            pipelines = max(pipelines, 2 if isinstance(spec, OuterRounds) else spec.group_size)
        whole = unlike is not None and isinstance(
            spec, SemiDecentralized | PartialReduce | ADPSGD | AllReduceModels | NoSync
        )
        self.depths = tuple((unlike or [])[:pipelines]) if whole else ()
        self.spec, self.stages, self.pipelines = spec, max(self.depths, default=stages), pipelines
        self.policy = build(spec, self.stages, pipelines, self.depths)
        self.told: list[tuple[float, Event, list[Decision]]] = []
        self.now = 0.0
        self.active: set[Worker] = set()
        self.waiting: dict[Worker, int] = {}
        self.iteration: dict[Worker, int] = {}
        self.last_sequence = -1
        connectivity = getattr(spec, "connectivity", None)
        unit = getattr(spec, "connectivity_unit", "rounds")
        self.graphs = [NaiveSyncGraph(connectivity, unit) if connectivity else None for _ in range(self.stages)]

    @property
    def stages_wait_for_each_other(self) -> bool:
        unlike = isinstance(self.spec, PartialReduce | OuterRounds) or isinstance(self.policy, LocalSGDPolicy)
        return unlike or bool(self.depths)

    def worker(self, data: st.DataObject) -> Worker:
        pipeline = data.draw(st.integers(0, self.pipelines - 1), label="pipeline")
        stages = self.depths[pipeline] if self.depths else self.stages
        return W(data.draw(st.integers(0, stages - 1), label="stage"), pipeline)

    def of(self, member: Worker) -> set[Worker]:
        """The workers that are answered together with it."""
        return {W(j, member.pipeline) for j in range(self.depths[member.pipeline])} if self.depths else {member}

    @property
    def whole(self) -> set[Worker]:
        """Those that take part, with all that are answered together."""
        stages = [{worker.pipeline for worker in self.active if worker.stage == j} for j in range(self.stages)]
        if isinstance(self.spec, OuterRounds) and any(pipelines != stages[0] for pipelines in stages):
            return set()  # a pipeline is still joining, or leaving
        return {worker for worker in self.active if self.of(worker) <= self.active}

    def graph_of(self, worker: Worker) -> NaiveSyncGraph | None:
        return self.graphs[0 if self.depths else worker.stage]

    def next_iteration(self, worker: Worker, step: int = 1) -> int:
        """All of a pipeline of unlike stages report the same."""
        waits = [self.waiting[other] for other in self.of(worker) if other in self.waiting]
        return waits[0] if waits and step > 0 else self.iteration.get(worker, -1) + step

    def tell(self, event: Event) -> list[Decision]:
        decisions = self.policy.on(event, self.now)
        self.told.append((self.now, event, decisions))
        return decisions

    def settle(self, groups: list[Group]) -> None:
        batches: dict[tuple[int, str], list[Group]] = {}
        for group in groups:
            assert group.sequence == self.last_sequence + 1
            self.last_sequence = group.sequence
            check_group(group, group.sequence)
            for member in group.members:
                for worker in self.of(member):
                    assert worker in self.active
                    if member not in group.passive:
                        self.iteration[worker] = self.waiting.pop(worker)
            batches.setdefault((group.stage, group.reason), []).append(group)
        for (stage, reason), batch in batches.items():
            graph = self.graphs[stage]
            if graph is None:
                continue
            connected = len(graph.components(batch)) == 1
            assert connected or reason == Reason.TOKEN_BUSY
            assert not connected or reason != Reason.TOKEN_BUSY
            graph.record(batch)

    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        worker = self.worker(data)
        if worker in self.active:
            with pytest.raises(RefusedEvent):
                self.policy.on(Joined(worker), self.now)
            return
        # Groups of a window that has just ended do not know the newcomer yet.
        self.settle(self.tell(Tick()))
        self.active.add(worker)
        self.iteration[worker] = max(self.iteration.get(other, -1) for other in self.of(worker)) if self.depths else -1
        graph = self.graph_of(worker)
        if graph is not None and worker in self.whole:
            graph.join(worker.pipeline)
        self.settle(self.tell(Joined(worker)))

    @rule(data=st.data(), kind=st.sampled_from([Left, Lost]))
    def leave_or_fall_silent(self, data: st.DataObject, kind: type[Left | Lost]) -> None:
        worker = self.worker(data)
        if worker not in self.active:
            with pytest.raises(RefusedEvent):
                self.policy.on(kind(worker), self.now)
            return
        self.settle(self.tell(Tick()))
        graph = self.graph_of(worker) if worker in self.whole else None
        self.active.remove(worker)
        waited = self.waiting.pop(worker, None) is not None
        if graph is not None and kind is Lost and not waited and self.iteration[worker] >= 0 and not self.depths:
            graph.forget_last(worker.pipeline)
        if graph is not None:
            graph.leave(worker.pipeline)
        self.settle(self.tell(kind(worker)))

    @rule(data=st.data(), step=st.sampled_from([1, 1, 1, 1, 2, 0, -1]))
    def report(self, data: st.DataObject, step: int) -> None:
        """Steps that are not positive are duplicates and latecomers."""
        worker = self.worker(data)
        iteration = self.next_iteration(worker, step)
        if worker not in self.active or worker in self.waiting or iteration <= self.iteration[worker]:
            before = self.policy.deadline()
            with pytest.raises(RefusedEvent):
                self.policy.on(Ready(worker, iteration), self.now)
            assert self.policy.deadline() == before
            return
        self.waiting[worker] = iteration
        self.settle(self.tell(Ready(worker, iteration)))

    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        worker = self.worker(data)
        event = Progress(worker, 1, 1, 0.5, 0.1)
        if worker in self.active:
            self.settle(self.tell(event))
        else:
            with pytest.raises(RefusedEvent):
                self.policy.on(event, self.now)

    @rule(skipped=st.integers(0, 3))
    def a_restart_is_made_known(self, skipped: int) -> None:
        assert self.tell(Restarted(self.last_sequence + 1 + skipped)) == []
        self.last_sequence += skipped

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 1.9, 3.0]))
    def pass_time(self, seconds: float) -> None:
        due = self.policy.deadline()
        if due is not None and due <= self.now + seconds:
            self.now = max(self.now, due)
        else:
            self.now += seconds
        self.settle(self.tell(Tick()))

    @invariant()
    def nobody_waits_without_a_reason(self) -> None:
        """If no clock will bring an answer, an active worker is still to come, and one stage enforces."""
        if not hasattr(self, "policy") or self.policy.deadline() is not None:
            return
        stages, computing = {w.stage for w in self.whole if w in self.waiting}, self.whole - self.waiting.keys()
        if self.stages_wait_for_each_other:
            assert not stages or computing
            return
        for stage in stages:
            assert any(w.stage == stage for w in computing)
        finite = isinstance(self.spec, SemiDecentralized) and self.spec.window != math.inf
        assert not finite or len(stages) <= 1

    def teardown(self) -> None:
        """If all that are active go on reporting, and windows end, everybody who waits is answered; and the same events
        make a new policy decide the same."""
        if not hasattr(self, "policy"):
            return
        again = build(self.spec, self.stages, self.pipelines, self.depths)
        for now, event, decisions in self.told:
            assert again.on(event, now) == decisions
        unanswered = {(worker, iteration) for worker, iteration in self.waiting.items() if worker in self.whole}
        for _ in range(1000):
            unanswered &= self.waiting.items()
            if not unanswered:
                return
            stages = {worker.stage for worker in self.waiting}
            free = [w for w in self.whole - set(self.waiting) if w.stage in stages or self.stages_wait_for_each_other]
            if free:
                # The one furthest behind comes next, as it would in a pipeline.
                worker = min(free, key=lambda w: (self.iteration[w], w))
                self.waiting[worker] = self.next_iteration(worker)
                self.settle(self.tell(Ready(worker, self.waiting[worker])))
            due = self.policy.deadline()
            if due is not None:
                self.now = max(self.now, due)
                self.settle(self.tell(Tick()))
        raise AssertionError(f"never answered: {sorted(unanswered)}")


TestAnyPolicy = AnyPolicy.TestCase
TestAnyPolicy.settings = settings(
    max_examples=settings.default.max_examples // 2, stateful_step_count=40, deadline=None
)


@settings(max_examples=settings.default.max_examples // 2, deadline=None)
@given(
    spec=semi_decentralized
    | st.sampled_from([LocalSGD(every=3), NoSync(), ADPSGD(seed=3), ADPSGD(asynchronous=True), PHDPSGD()]),
    stages=st.integers(1, 8),
    pipelines=st.integers(2, 64),
    asynchronous=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_pipelines_never_get_stuck(
    spec: PolicyConfig, stages: int, pipelines: int, asynchronous: bool, seed: int
) -> None:
    policy = spec.make_policy(stages, pipelines)
    iterations = max(3, min(20, 2000 // (stages * pipelines)))
    delay, probability = 5 * uniform(seed, 0), uniform(seed, 1) / 2
    assert (
        simulate(policy, straggling(stages, pipelines, iterations, seed, asynchronous, delay, probability)).stuck == []
    )
    assert (policy.deadline(), getattr(policy, "token_holder", None)) == (None, None)


def test_local_sgd_averages_every_third_iteration_only() -> None:
    run = simulate(LocalSGD(every=3), straggling(2, 3, 9, 0))
    sizes = [len(group.members) for _, group in run.groups if group.stage == 0]
    assert sorted(sizes) == [1] * 18 + [3] * 3
    assert set(run.reasons) == {Reason.LOCAL_STEP, Reason.EVERYBODY_CAME}


def test_a_pair_goes_out_when_both_have_come() -> None:
    policy = ADPSGDPolicy(1, 4, seed=0)
    join_all(policy, 1, 4)
    partner = matching(4, 0, 0)[0]
    others = sorted({1, 2, 3} - {partner})
    assert policy.on(Ready(W(0, 0), 0), 0.0) == []
    assert policy.on(Ready(W(0, others[0]), 0), 1.0) == []
    assert brief(policy.on(Ready(W(0, partner), 0), 2.0)) == [(0, (0, partner), Reason.MATCHED)]
    assert brief(policy.on(Left(W(0, others[1])), 3.0)) == [(0, (others[0],), Reason.WORKER_LOST)]


def test_nobody_waits_for_a_partner_that_is_past_that_iteration() -> None:
    policy = ADPSGDPolicy(1, 2, seed=0)
    join_all(policy, 1, 2)
    assert policy.on(Ready(W(0, 0), 0), 0.0) == []
    groups = policy.on(Ready(W(0, 1), 5), 1.0)
    assert brief(groups) == [(0, (0,), Reason.LOCAL_STEP)]
    assert policy.on(Ready(W(0, 0), 3), 2.0) != []


def test_an_asynchronous_neighbour_is_drawn_among_the_active_and_not_waited_for() -> None:
    policy = AsynchronousADPSGDPolicy(1, 4, seed=0)
    join_all(policy, 1, 4)
    policy.on(Left(W(0, 2)), 0.0)
    drawn = set()
    for k in range(50):
        (group,) = policy.on(Ready(W(0, 1), k), 0.0)
        (neighbour,) = group.passive
        assert set(group.members) == {W(0, 1), neighbour}
        drawn.add(neighbour.pipeline)
    assert drawn == {0, 3}
