"""Draws are what the paper says, and the same for everyone who asks again."""

import math
from typing import Any

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import DelayInjector, Delays, condition

PASSES = ("forward", "backward")


def frequency(delays: Delays, during: Any, draws: int = 4000) -> float:
    hits = sum(delays.delay(i % 4, i % 5, i, during) > 0 for i in range(draws))
    return hits / draws


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("seed", [0, 7])
def test_delays_come_with_their_probability(probability: float, seed: int) -> None:
    delays = Delays(probability=probability, seconds=0.3, draws="pass", seed=seed)
    tolerance = 4 * math.sqrt(probability * (1 - probability) / 4000)
    for during in PASSES:
        assert abs(frequency(delays, during) - probability) < tolerance


def test_one_draw_per_iteration_comes_before_the_forward() -> None:
    delays = Delays(probability=1.0, seconds=0.3)
    assert frequency(delays, "forward") == 1.0
    assert frequency(delays, "backward") == 0.0


def test_workers_iterations_passes_and_seeds_draw_independently() -> None:
    def pattern(seed: int = 0, stage: int = 0, pipeline: int = 0, during: Any = "forward") -> list[bool]:
        delays = Delays(probability=0.5, seconds=1.0, draws="pass", seed=seed)
        return [delays.delay(stage, pipeline, i, during) > 0 for i in range(400)]

    base = pattern()
    assert base == pattern()
    for other in (pattern(seed=1), pattern(stage=1), pattern(pipeline=1), pattern(during="backward")):
        agreement = sum(a == b for a, b in zip(base, other, strict=True))
        assert abs(agreement - 200) < 40  # four standard deviations
    assert pattern(stage=1, pipeline=11) != pattern(stage=11, pipeline=1)


def test_injector_sleeps_what_was_drawn_in_any_order() -> None:
    delays = Delays(probability=0.5, seconds=0.25, draws="pass", seed=3)
    slept: list[float] = []
    forwards = DelayInjector(delays, stage=1, pipeline=2, sleep=slept.append)
    for iteration in range(20):
        forwards.before_forward(iteration)
        forwards.before_backward(iteration)
    backwards = DelayInjector(delays, stage=1, pipeline=2, sleep=lambda _: None)
    for iteration in reversed(range(20)):
        backwards.before_backward(iteration)
        backwards.before_forward(iteration)

    drawn = {i: sum(delays.delay(1, 2, i, p) for p in PASSES) for i in range(20)}  # type: ignore[arg-type]
    assert forwards.injected_by_iteration == {i: s for i, s in drawn.items() if s > 0}
    assert forwards.injected_by_iteration == backwards.injected_by_iteration
    assert forwards.injected_seconds == math.fsum(slept) == sum(drawn.values())
    assert 0.0 not in slept


@pytest.mark.parametrize(
    ("name", "model", "seconds"), [("A", "resnet", 0.1), ("A", "bert", 0.2), ("B", "resnet", 0.3), ("B", "bert", 0.6)]
)
def test_conditions_of_the_paper(name: Any, model: Any, seconds: float) -> None:
    assert condition(name, model, seed=2) == Delays(probability=0.1, seconds=seconds, seed=2)


def test_unknown_condition_names_the_known() -> None:
    with pytest.raises(ConfigurationError, match="B with bert"):
        condition("C", "bert")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"probability": 1.1}, {"seconds": math.inf}, {"scale": -0.5}, {"draws": "epoch"}])
def test_impossible_delays_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Delays(**wrong)
