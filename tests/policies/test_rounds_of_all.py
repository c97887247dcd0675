"""Rounds of all: whatever breaks, comes and goes, the models of a stage are the same rounds, and none waits."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdpipe.policies.all_reduce import AllPresent
from lightning_sdpipe.policies.outer_rounds import OuterRounds
from lightning_sdpipe.policies.policy import PolicyConfig
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
    rare = {name: happened[name] for name in ("broken", "handed", "not handed", "deaths", "came", "left", "restarts")}
    assert all(rare.values()), rare


def test_stages_would_wait_for_each_other_if_heartbeats_told_nothing() -> None:
    """Pipeline 0 has the round on stage 0, and 1 has it on stage 1: neither can be ready again before it has both."""
    broke = 0
    for seed in range(40):
        try:
            World(seed, AllPresent(), 2, one=True, beats=False).run(STEPS, CALM)
        except Violation:
            broke += 1
    assert broke
