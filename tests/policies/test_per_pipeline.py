"""A policy of one stage that decides about pipelines of unlike depths."""

from __future__ import annotations

import pytest

from lightning_sdpipe.policies import Group, Joined, Left, Lost, Policy, Ready, Worker, registry
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.events import Event, Progress, Vanished, Widened
from lightning_sdpipe.policies.per_pipeline import PerPipeline
from lightning_sdpipe.policies.policy import PolicyConfig, RefusedEvent
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from tests.policies.scripted import brief

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
