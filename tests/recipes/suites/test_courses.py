"""Courses of trainings in virtual time, and the replicas that follow them."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Any

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import Static
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.simulate import Work, jittered
from recipes.suites.convergence import Learning, measure
from recipes.suites.courses import Step, dealt, in_step

FACTORS = [1.0, 1.0, 1.0, 2.0]


def work(factors: list[float], iterations: int = 50) -> Work:
    length = jittered(0.1, 0.05)
    return Work(1, len(factors), iterations, length, heterogeneity=Static(factors), exchange=lambda group: 0.005)


def test_a_slow_device_trains_fewer_batches_and_holds_up_only_all_reduce() -> None:
    course = dealt(SemiDecentralized(), work(FACTORS), 1)
    trained = Counter(event.pipeline for event in course if isinstance(event, Step))
    assert trained[3] == pytest.approx(200 / 7, abs=3)
    ends = in_step(work(FACTORS), 1)
    assert len(ends) == 50
    assert 1.55 < ends[-1] / course[-1].at < 1.75


def test_what_has_no_course_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="one stage, not of 2"):
        dealt(SemiDecentralized(), Work(2, 2, 10), 1)
    with pytest.raises(ConfigurationError, match="all wait"):
        dealt(ADPSGD(asynchronous=True), work(FACTORS), 1)


def test_replicas_that_always_meet_are_one_joint_batch() -> None:
    """With plain SGD the mean of models after a step is the model after the mean gradient."""
    options: dict[str, Any] = {
        "heterogeneity": {"_target_": "lightning_sdpipe.heterogeneity.Static", "factors": [1.0]},
        "workload": {
            "model": {"_target_": "recipes.digits.DigitsResNet", "channels": 8, "depth": 1, "momentum": 0.0, "lr": 0.2},
            "data": {"_target_": "recipes.digits.Digits", "batch_size": 32},
        },
        **{"num_pipelines": 3, "passes": 2, "seconds": 0.1, "exchange": 0.0, "variance_correction": False},
        **{"metric": "val_accuracy", "points": 2, "seed": 0},
    }
    models, rounds, gradients = (
        measure(Learning(method={"_target_": f"lightning_sdpipe.{name}", **given}, **options))
        for name, given in (
            ("SemiDecentralized", {"window": inf}),
            ("DiLoCo", {"every": 1, "lr": 1.0, "momentum": 0.0}),
            ("AllReduce", {}),
        )
    )
    for averaged in (models, rounds):
        for point, expected in zip(averaged["curve"], gradients["curve"], strict=True):
            assert point[1:] == pytest.approx(expected[1:], rel=0.01)
    assert [point[1] for point in models["curve"]] == [14 * 3 * 32, 28 * 3 * 32]
    assert models["final"] > 0.3
