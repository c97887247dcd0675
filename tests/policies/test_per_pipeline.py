"""A policy of one stage that decides about pipelines of unlike depths."""

from __future__ import annotations

import random
from itertools import groupby

import pytest

from lightning_sdpipe.policies import Group, Joined, Left, Lost, Policy, Ready, Reason, Worker, registry
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.events import Event, Progress, Restarted, Tick, Vanished, Widened
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.policies.per_pipeline import PerPipeline
from lightning_sdpipe.policies.policy import PolicyConfig, RefusedEvent
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from tests.policies.scripted import NaiveSyncGraph, brief

W = Worker


class Recorder:
    """Passes everything on to a policy, and keeps what it was told."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.told = policy, list[tuple[Event, list[Group]]]()

    def on(self, event: Event, now: float) -> list[Group]:
        decisions = self.policy.on(event, now)
        self.told.append((event, decisions))
        return decisions

    def deadline(self) -> float | None:
        return self.policy.deadline()


def made(config: PolicyConfig, *depths: int) -> tuple[PerPipeline, Recorder]:
    """A policy whose workers have all joined."""
    inner = Recorder(registry.build(config, 1, len(depths)))
    policy = PerPipeline(inner, depths)
    for i, depth in enumerate(depths):
        for j in range(depth):
            assert policy.on(Joined(W(j, i)), 0.0) == []
    assert [event for event, _ in inner.told] == [Joined(W(0, i)) for i in range(len(depths))]
    inner.told.clear()
    return policy, inner


def test_a_pipeline_is_ready_when_its_last_worker_is() -> None:
    policy, inner = made(AllReduceModels(), 1, 2)
    assert policy.on(Ready(W(0, 0), 3), 1.0) == []
    assert policy.on(Ready(W(0, 1), 3), 2.0) == []
    assert [event for event, _ in inner.told] == [Ready(W(0, 0), 3)]
    (group,) = policy.on(Ready(W(1, 1), 3), 3.0)
    assert brief([group])[0][:2] == (0, (0, 1))
    for worker in (W(0, 0), W(0, 1), W(1, 1)):
        with pytest.raises(RefusedEvent, match="reported iteration 3 after 3"):
            policy.on(Ready(worker, 3), 4.0)


def test_a_lost_stage_takes_its_pipeline_out_and_all_of_it_comes_back_together() -> None:
    policy, inner = made(AllReduceModels(), 1, 2)
    policy.on(Ready(W(0, 0), 0), 1.0)
    policy.on(Ready(W(1, 1), 0), 1.0)
    assert brief(policy.on(Lost(W(0, 1)), 2.0))[0][1] == (0,)
    assert inner.told[-1][0] == Lost(W(0, 1))
    assert brief(policy.on(Ready(W(0, 0), 1), 3.0))[0][1] == (0,)
    inner.told.clear()
    assert policy.on(Joined(W(0, 1), 0), 4.0) == []
    assert inner.told == [(Joined(W(0, 1), 0), [])]
    assert policy.on(Left(W(1, 1)), 5.0) == []
    assert policy.on(Left(W(0, 1)), 5.0) == []
    assert [event for event, _ in inner.told[1:]] == [Left(W(0, 1))], "the first that leaves takes it out"


def test_a_pipeline_that_vanishes_is_one_node() -> None:
    policy, inner = made(AllReduceModels(), 1, 2)
    policy.on(Lost(W(1, 1)), 2.0)
    policy.on(Vanished(W(1, 1)), 2.0)
    assert inner.told[-1][0] == Vanished(W(0, 1))


def test_a_ready_outlasts_another_stage_that_comes_back() -> None:
    policy, _ = made(AllReduceModels(), 1, 3)
    for stage in (0, 2):
        policy.on(Ready(W(stage, 1), 0), 1.0)
    policy.on(Lost(W(1, 1)), 2.0)
    policy.on(Joined(W(1, 1)), 3.0)
    policy.on(Ready(W(0, 0), 0), 3.0)
    assert brief(policy.on(Ready(W(1, 1), 0), 4.0))[0][1] == (0, 1)


def test_only_the_last_stage_tells_how_fast_a_pipeline_is() -> None:
    policy, inner = made(SemiDecentralized(), 2, 1)
    for stage in (0, 1):
        policy.on(Progress(W(stage, 0), 1, 1, 1.0 + stage, 0.0), 1.0)
    assert [event for event, _ in inner.told] == [Progress(W(0, 0), 1, 1, 2.0, 0.0)]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (Ready(W(1, 0), 0), "without having joined"),
        (Joined(W(1, 0)), "does not exist in 2 pipelines of 1, 2 stages"),
        (Joined(W(0, 2)), "does not exist"),
        (Joined(W(0, 0)), "joined twice"),
        (Left(W(1, 0)), "left without having joined"),
        (Progress(W(1, 0), 1, 1, 1.0, 0.0), "went on without having joined"),
        (Ready(W(0, 1), 5), "waits for an answer"),
        (Ready(W(1, 1), 5), "reported iteration 5, and stage 0 of its pipeline waits with iteration 4"),
        (Widened(3), "there are 2 pipelines"),
    ],
)
def test_what_breaks_a_rule_changes_nothing(event: Event, said: str) -> None:
    policy, inner = made(AllReduceModels(), 1, 2)
    policy.on(Ready(W(0, 1), 4), 1.0)
    inner.told.clear()
    with pytest.raises(RefusedEvent, match=said):
        policy.on(event, 2.0)
    assert inner.told == []
    policy.on(Ready(W(0, 0), 4), 3.0)
    assert len(policy.on(Ready(W(1, 1), 4), 3.0)) == 1


CONFIGS = (SemiDecentralized, SemiDecentralized, PartialReduce, ADPSGD, AllReduceModels, NoSync)


def drawn(draw: random.Random, pipelines: int) -> PolicyConfig:
    kind = draw.choice(CONFIGS)
    if kind is PartialReduce:
        return PartialReduce(group_size=draw.randint(2, pipelines))
    if kind is SemiDecentralized:
        return SemiDecentralized(
            window=draw.choice([0.0, 0.5, 2.0, "auto", "paper"]),
            connectivity=draw.choice([None, 1, 2, 5]),
            max_group=draw.choice([None, 2, 3]),
        )
    return kind()


class World:
    """Workers of pipelines of unlike depths that come, compute, fall silent and return, in any order, and a scheduler
    that is started again: each worker does its next step once it was answered."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.now = draw, 0.0
        self.depths = [draw.randint(1, 4) for _ in range(draw.randint(2, 6))]
        self.config = drawn(draw, len(self.depths))
        self.workers = [W(j, i) for i, depth in enumerate(self.depths) for j in range(depth)]
        self.answered = dict.fromkeys(self.workers, -1)
        self.active: set[Worker] = set()
        self.ready: set[Worker] = set()
        self.next_sequence = 0
        self.start()

    def start(self) -> None:
        """A scheduler."""
        self.policy = PerPipeline(registry.build(self.config, 1, len(self.depths)), self.depths)
        connectivity = getattr(self.config, "connectivity", None)
        self.graph = NaiveSyncGraph(connectivity) if connectivity else None
        self.whole: set[int] = set()
        self.active.clear()
        self.ready.clear()
        self.tell(Restarted(self.next_sequence))

    def tell(self, event: Event) -> None:
        groups = self.policy.on(event, self.now)
        for group in groups:
            assert group.sequence >= self.next_sequence
            self.next_sequence = group.sequence + 1
            for member in group.members:
                assert member.stage == 0
                pipeline = {W(j, member.pipeline) for j in range(self.depths[member.pipeline])}
                assert pipeline <= self.ready, "all of a pipeline are ready, or none is answered"
                self.ready -= pipeline
                for worker in pipeline:
                    self.answered[worker] += 1
        for reason, batch in groupby(groups, lambda group: group.reason):
            assert reason != Reason.TOKEN_BUSY, "the token is always free"
            if self.graph is not None:
                together = [*batch]
                assert len(self.graph.components(together)) == 1
                self.graph.record(together)

    def join(self, worker: Worker) -> None:
        self.tell(Tick())
        self.active.add(worker)
        i = worker.pipeline
        if self.graph is not None and all(W(j, i) in self.active for j in range(self.depths[i])):
            self.graph.join(i)
            self.whole.add(i)
        self.tell(Joined(worker, self.answered[worker] if self.answered[worker] >= 0 else None))

    def lose(self, worker: Worker) -> None:
        self.tell(Tick())
        self.active.discard(worker)
        self.ready.discard(worker)
        if worker.pipeline in self.whole:
            self.whole.discard(worker.pipeline)
            assert self.graph is not None
            self.graph.leave(worker.pipeline)
        self.tell(self.draw.choice([Left, Lost])(worker))

    def step(self) -> None:
        """Something happens."""
        self.now += self.draw.choice([0.0, 0.1, 1.0])
        self.tell(Tick())
        away = [worker for worker in self.workers if worker not in self.active]
        computing = [worker for worker in self.workers if worker in self.active - self.ready]
        chance = self.draw.random()
        if chance < 0.01:
            self.start()
        elif chance < 0.04 and self.active:
            self.lose(self.draw.choice(sorted(self.active)))
        elif away and (chance < 0.3 or not computing):
            self.join(self.draw.choice(away))
        elif computing:
            worker = self.draw.choice(computing)
            self.ready.add(worker)
            self.tell(Ready(worker, self.answered[worker] + 1))

    def settle(self) -> None:
        """All come back and go on, until each was answered once more than any was before."""
        for worker in self.workers:
            if worker not in self.active:
                self.join(worker)
        goal = max(self.answered.values()) + 1
        while any(count < goal for count in self.answered.values()):
            for worker in self.workers:
                if worker not in self.ready:
                    self.ready.add(worker)
                    self.tell(Ready(worker, self.answered[worker] + 1))
            due = self.policy.deadline()
            assert due is not None or len(self.ready) < len(self.workers), f"stuck: {self.config} with {self.depths}"
            if due is not None:
                self.now = max(self.now, due)
                self.tell(Tick())


@pytest.mark.parametrize("block", range(10))
def test_no_worker_is_stuck_in_random_worlds(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        world = World(random.Random(seed))
        for _ in range(40):
            world.step()
        world.settle()
