"""Rounds of all: whatever breaks, comes and goes, the models of a stage are the same rounds, and none waits."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdpipe.policies import Joined, Ready, Worker
from lightning_sdpipe.policies.all_reduce import AllPresent
from lightning_sdpipe.policies.events import Contains
from lightning_sdpipe.policies.outer_rounds import OuterRounds
from lightning_sdpipe.policies.policy import PolicyConfig, RefusedEvent
from tests.policies.rounds import Violation, World

STEPS, CALM = 500, 1200
KINDS = [(AllPresent(), True), (OuterRounds(2), False), (OuterRounds(None), False)]


@pytest.mark.parametrize(("config", "one"), KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), stages=st.integers(1, 3))
def test_models_are_the_same_rounds_whatever_happens(config: PolicyConfig, one: bool, seed: int, stages: int) -> None:
    World(seed, config, stages, one).run(STEPS, CALM)


@pytest.mark.parametrize(("config", "one"), KINDS)
def test_such_histories_have_everything(config: PolicyConfig, one: bool) -> None:
    happened: Counter[str] = Counter()
    for seed in range(20):
        world = World(seed, config, 2, one)
        world.run(STEPS, CALM)
        happened += world.counts
    rare = {
        name: happened[name]
        for name in ("broken", "handed", "not handed", "deaths", "came", "left", "restarts", "unheard")
    }
    assert all(rare.values()), rare


def stands(seeds: range, config: PolicyConfig, **options: bool) -> bool:
    """Whether a promise is broken with any of ``seeds``."""
    for seed in seeds:
        try:
            World(seed, config, 2, **options).run(STEPS, CALM)
        except Violation:
            return True
    return False


def test_rounds_would_stand_if_a_stage_waited_to_be_called_to_one_that_only_an_earlier_scheduler_had_named() -> None:
    """Stage 0 has not heard of its group, and the scheduler that is started again names another one when all wait."""
    assert stands(range(30, 40), OuterRounds(None), one=False, drops=False)


def test_each_that_lacks_an_outcome_asks_all_that_have_its_round_in_turn() -> None:
    """Newcomers have the round, but cannot hand its outcome over; that others ask must not hide those that can."""
    policy = AllPresent().make_policy(2, 4)
    receivers = [Worker(stage, pipeline) for stage in (0, 1) for pipeline in (2, 3)]
    for stage, pipeline in product((0, 1), range(4)):
        policy.on(Joined(Worker(stage, pipeline)), 0.0)
    for stage, pipeline in product((0, 1), range(2)):
        policy.on(Contains(Worker(stage, pipeline), 1), 0.0)
    asked: dict[Worker, set[Worker | None]] = {receiver: set() for receiver in receivers}
    for iteration in (1, 2):
        for receiver in receivers:
            (given,) = policy.on(Ready(receiver, iteration, 0), 0.0)
            asked[receiver].add(given.source)
    assert asked == {each: {Worker(each.stage, pipeline) for pipeline in (0, 1)} for each in receivers}


def test_a_worker_that_does_not_exist_contains_nothing() -> None:
    with pytest.raises(RefusedEvent, match="does not exist"):
        AllPresent().make_policy(2, 4).on(Contains(Worker(2, 0), 1), 0.0)


def test_stages_would_wait_for_each_other_if_heartbeats_told_nothing() -> None:
    """Pipeline 0 has the round on stage 0, and 1 has it on stage 1: neither can be ready again before it has both."""
    assert stands(range(40), AllPresent(), one=True, beats=False)
