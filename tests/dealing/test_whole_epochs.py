"""Whole epochs that are dealt by speed, in virtual time, as ``suite=convergence`` plays them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdpipe.dealing.leases import START
from lightning_sdpipe.policies import PolicyConfig, Worker
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import LocalSGD, NoSync
from lightning_sdpipe.policies.pairing import uniform
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.simulate import Work
from recipes.suites.courses import Mean, Step, dealt

Seconds = Callable[[Worker, int], float]
EVERYTHING = [
    *(NoSync(), SemiDecentralized(), SemiDecentralized(window=0.0), AllReduceModels(), LocalSGD(every=4), ADPSGD())
]
AT_THEIR_OWN_SPEED = [NoSync(), SemiDecentralized()]


def constant(*seconds: float) -> Seconds:
    return lambda worker, iteration: seconds[worker.pipeline]


def run(
    config: PolicyConfig, pipelines: int, length: int, seconds: Seconds, epochs: int = 2
) -> tuple[list[Step], list[float]]:
    """The batches, each of which is trained exactly once, and the ends of the epochs, after the first of which is 0."""
    course = dealt(config, Work(1, pipelines, length, seconds), epochs)
    steps = [event for event in course if isinstance(event, Step)]
    every = [(epoch, position) for epoch in range(epochs) for position in range(pipelines * length)]
    assert sorted((step.epoch, step.position) for step in steps) == every
    ends = [0.0, *(event.at for event in course if isinstance(event, Mean) and event.meeting)]
    assert all(ends[step.epoch] < step.at <= ends[step.epoch + 1] for step in steps)
    return steps, ends


@pytest.mark.parametrize("config", EVERYTHING, ids=str)
def test_four_epochs_on_devices_of_several_generations(config: PolicyConfig) -> None:
    for factors, possible in (((1, 1, 1, 2), 1.75), ((1, 1, 2, 4), 2.75)):
        _, ends = run(config, 4, 30, constant(*(0.1 * factor for factor in factors)), 4)
        for begin, end in pairwise(ends[1:]):
            gain = max(factors) * 0.1 * 30 / (end - begin)
            assert 0.9 <= gain <= possible + 1e-9
            if config in AT_THEIR_OWN_SPEED:
                assert gain >= (1.6 if factors[-1] == 2 else 2.4)


@given(
    seconds=st.lists(st.sampled_from([0.02, 0.05, 0.1, 0.13, 0.4, 1.0, 3.0]), min_size=1, max_size=8),
    length=st.integers(1, 60),
)
@settings(max_examples=settings.default.max_examples // 4, deadline=None)
def test_at_steady_speeds_nobody_waits_longer_than_one_batch_of_its_own(seconds: list[float], length: int) -> None:
    """From the third epoch on, if all speeds are known: the first batch of an epoch may tell a second too little, and
    the slowest pipeline may be tried again."""
    steps, ends = run(NoSync(), len(seconds), length, constant(*seconds), 4)
    trained = Counter((step.epoch, step.pipeline) for step in steps)
    for epoch, (begun, over) in enumerate(pairwise(ends)):
        unknown = any(trained[epoch - 1, pipeline] < 2 for pipeline in range(len(seconds)))
        for pipeline, own in enumerate(seconds) if epoch > 1 else ():
            last = max((s.at for s in steps if (s.epoch, s.pipeline) == (epoch, pipeline)), default=begun)
            assert over - last <= own * (1 + 1e-6) + max(START, *seconds) * unknown


@pytest.mark.parametrize(
    ("seconds", "length", "longest"),
    [((0.9, 0.9, 0.9, 60.0), 1, 500.0), ((0.005, 0.005, 0.005, 1.02), 100, 60.0)],
)
def test_a_slow_pipeline_does_not_hold_up_every_epoch(seconds: tuple[float, ...], length: int, longest: float) -> None:
    """Where the first batch of an epoch alone tells its speed, or the speeds of the others are unknown."""
    _, ends = run(NoSync(), len(seconds), length, constant(*seconds), 40)
    assert ends[-1] < longest


@given(
    pipelines=st.integers(1, 6),
    length=st.integers(1, 40),
    config=st.sampled_from(EVERYTHING),
    spread=st.sampled_from([0.0, 0.1, 3.0]),
    stall=st.sampled_from([0.0, 0.0, 2.0, 30.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=settings.default.max_examples // 2, deadline=None)
def test_every_batch_is_trained_exactly_once(
    pipelines: int, length: int, config: PolicyConfig, spread: float, stall: float, seed: int
) -> None:
    """Whatever the speeds and stalls; and the progress by which learning rates count never falls."""

    def seconds(worker: Worker, iteration: int) -> float:
        stalls = stall * (uniform(seed, worker.pipeline, iteration, 1) < 0.05)
        own = 1 + spread * uniform(seed, worker.pipeline)
        return 0.1 * own * (1 + 0.2 * uniform(seed, worker.pipeline, iteration)) + stalls

    steps, _ = run(config, pipelines, length, seconds)
    for pipeline in range(pipelines):
        updates = [(step.epoch, step.update) for step in steps if step.pipeline == pipeline]
        assert updates == sorted(updates)
        assert all(0 <= update < length for _, update in updates)


@pytest.mark.parametrize("pipelines", [1, 3, 4])
def test_equal_speeds_give_everybody_its_own_shard_in_order(pipelines: int) -> None:
    steps, _ = run(SemiDecentralized(), pipelines, 30, lambda *_: 0.3)
    for pipeline in range(pipelines):
        mine = [(step.position, step.update) for step in steps if step.pipeline == pipeline]
        assert mine == 2 * [(number * pipelines + pipeline, number) for number in range(30)]


def test_a_stall_costs_no_more_than_its_own_length() -> None:
    def stalls(worker: Worker, iteration: int) -> float:
        return 0.1 * (1 + worker.pipeline) + (5.0 if (worker.pipeline, iteration) == (1, 40) else 0.0)

    ends = [run(NoSync(), 3, 100, seconds)[1][-1] for seconds in (stalls, constant(0.1, 0.2, 0.3))]
    assert 0 <= ends[0] - ends[1] <= 5.0 + 0.3
