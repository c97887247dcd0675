"""Training in virtual time computes what loops compute."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_sdpipe.heterogeneity import Static
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.simulate import Work, jittered
from recipes.baselines.admission import AdmissionRule
from recipes.suites.virtual import Network, Quadratic, by_decisions, by_time


def work(pipelines: int = 4, iterations: int = 100, slowest: float = 1.0) -> Work:
    slow = Static([slowest, *[1.0] * (pipelines - 1)])
    return Work(1, pipelines, iterations, jittered(0.1, 0.1), heterogeneity=slow, exchange=lambda group: 0.005)


def test_synchronous_methods_compute_what_a_loop_computes() -> None:
    """Without noise all pipelines take equal steps, whether models or updates are averaged."""
    problem = Quadratic(4, 0.3, 0, 8, noise=0.0)
    model, expected = problem.start, []
    for _ in range(20):
        model = model + problem.change(model, 0)
        expected.append(problem.value(model))
    for method in (AllReduceModels(), PartialReduce(4), AdmissionRule(), AdmissionRule(quorum=4)):
        points = by_decisions(method, work(iterations=20), Quadratic(4, 0.3, 0, 8, noise=0.0))
        assert [point.value for point in points[1:]] == pytest.approx(expected)
        assert (points[-1].steps, points[-1].updates) == (80, 20)


def test_models_learn_along_the_decisions() -> None:
    points = by_decisions(PartialReduce(2, decay=0.5), work(iterations=40), Quadratic(4, 0.1, 0))
    assert points[-1].value < 0.1 * points[0].value
    options: dict[str, Any] = {"lr": 0.05, "hidden": 16, "batch_size": 16, "momentum": 0.9}
    plain, due = Work(1, 4, 60, 1.0), [20.0, 40.0, 60.0]
    together, apart = (
        by_time(method, plain, Network(4, seed=0, **options), due) for method in (AllReduceModels(), NoSync())
    )
    assert together[-1].value > 0.85
    assert [point.steps for point in together] == [point.steps for point in apart]
    assert together != apart
    alone = [
        by_time(method, Work(1, 1, 60, 1.0), Network(1, seed=3, **options), due)
        for method in (AllReduceModels(), NoSync())
    ]
    assert [point.value for point in alone[0]] == [point.value for point in alone[1]]
