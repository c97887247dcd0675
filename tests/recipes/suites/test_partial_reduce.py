"""The suite of partial reduce: training in virtual time, its ratios and its figures."""

from __future__ import annotations

import inspect
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import Static
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.simulate import Work, jittered
from recipes.baselines.admission import AdmissionRule
from recipes.bench import ratio_table
from recipes.suites import convergence, partial_reduce, throughput
from recipes.suites.partial_reduce.virtual import Digits, Quadratic, at_target, train
from tests.recipes.composed import parameters_of

suite = partial(parameters_of, "partial_reduce")


def work(pipelines: int = 4, iterations: int = 100, slowest: float = 1.0) -> Work:
    slow = Static([slowest, *[1.0] * (pipelines - 1)])
    return Work(1, pipelines, iterations, jittered(0.1, 0.1), heterogeneity=slow, exchange=lambda group: 0.005)


def test_synchronous_methods_compute_what_a_loop_computes() -> None:
    """Without noise all pipelines take equal steps, whether models or updates are averaged."""
    problem = Quadratic(8, noise=0.0)
    model, expected = problem.start, []
    for _ in range(20):
        model = model - 0.3 * problem.gradient(model, 0, numpy.random.default_rng(0))
        expected.append(problem.loss(model))
    for method in (AllReduceModels(), PartialReduce(4), AdmissionRule(), AdmissionRule(quorum=4)):
        points = train(method, work(iterations=20), problem, 0.3, seed=0)
        assert [point.loss for point in points[1:]] == pytest.approx(expected)
        assert points[-1].steps == 80
        assert points[-1].updates == 20


def test_a_quadratic_ends_where_all_reduce_ends() -> None:
    """Within a twentieth of what all-reduce has removed of the loss, on unequal devices."""
    problem = Quadratic(16, noise=0.1)
    ends = {
        config: train(config, work(8, 200, slowest=3.0), problem, 0.2, seed=0)[-1].loss
        for config in (AllReduceModels(), PartialReduce(3), PartialReduce(3, decay=0.5))
    }
    removed = problem.loss(problem.start) - ends[AllReduceModels()]
    for loss in ends.values():
        assert problem.loss(problem.start) - loss == pytest.approx(removed, rel=0.05)


def test_late_pushes_count_as_the_rule_says() -> None:
    """The slow one of four is never among three."""
    problem = Quadratic(8)
    dropped = train(AdmissionRule(quorum=3), work(slowest=5.0), problem, 0.1, seed=0)[-1]
    carried = train(AdmissionRule(quorum=3, late="carry"), work(slowest=5.0), problem, 0.1, seed=0)[-1]
    assert dropped.steps == 3 * dropped.updates
    assert carried.steps == pytest.approx((3 + 1 / 5) * carried.updates, rel=0.05)


def test_the_digits_are_learned() -> None:
    points = train(PartialReduce(2, decay=0.5), work(iterations=40), Digits(4), 0.5, seed=0)
    assert points[0].loss == pytest.approx(math.log(10))
    assert points[-1].loss < 0.8
    assert at_target(points, 1.0) in points
    assert at_target(points, 0.0) is None


def test_every_method_of_the_suite_can_be_built() -> None:
    parameters = suite()
    for name in {m for part in ("virtual", "sweep", "production") for m in parameters[part]["compared"]}:
        assert partial_reduce._method(parameters["methods"][name]).make_policy(1, 8)
    wanted = {key.rpartition("/")[2] for key in partial_reduce.SPEED_GOALS}
    assert wanted <= set(parameters["emulated"]["grid"]["partial_reduce"]["heterogeneity"])
    assert parameters["emulated"]["only"] == ["partial_reduce"]
    for other, name in ((throughput, "emulated"), (convergence, "training")):
        inspect.signature(other.run).bind(**parameters[name], seed=0)


def small() -> dict[str, Any]:
    parts = ("virtual", "sweep", "production")
    short = [f"suite.{part}.{name}" for part in parts for name in ("repeats=1", "iterations=20", "target=50")]
    return suite(
        *short,
        "suite.virtual.compared=[all_reduce,eager,asp,hete,backup3,preduce,dynamic]",
        "suite.virtual.conditions=[hl3,one_x5,trace]",
        "suite.sweep.compared=[p2,p8]",
        "suite.production.problem=quadratic",
        "suite.scaling.workers=[1,4,32]",
        "suite.scaling.iterations=10",
        "suite.scaling.repeats=1",
        "suite.only=[virtual,sweep,production,scaling]",
    )


def test_a_small_run_has_its_tables_ratios_and_figures(tmp_path: Path) -> None:
    rows, ratios = partial_reduce.run(**{**small(), "output": str(tmp_path / "out.json")})
    assert {row["what"] for row in rows} == {"virtual", "sweep", "production", "scaling", "table 1"}
    expected = {*partial_reduce.TIME_GOALS, *partial_reduce.RATE_GOALS, "scaling/32/preduce_over_backup"}
    assert set(ratios) == expected
    paper = next(r for r in rows if (r["what"], r["method"], r["heterogeneity"]) == ("table 1", "dynamic", "hl3"))
    assert paper["paper_over_all_reduce"] == pytest.approx(1150 / 603)
    drawn = {file.name for file in tmp_path.iterdir()}
    assert drawn == {f"out.{part}{kind}" for part in small()["only"] for kind in (".png", ".svg")}


def emulated(method: str, condition: str, speed: float) -> dict[str, Any]:
    return {"what": method, "heterogeneity": condition, "repeat": 0, "samples_per_s": speed}


def test_what_is_measured_to_be_known_has_no_goal() -> None:
    rows = [emulated(method, "hl3", speed) for method, speed in (("sdpipe", 3.0), ("preduce", 2.0), ("nosync", 2.5))]
    ratios = partial_reduce.ratios({"emulated": rows})
    assert {key: ratio["value"] for key, ratio in ratios.items()} == {
        "preduce/nosync/hl3": 0.8,
        "sdpipe/preduce/hl3": 1.5,
    }
    known, missed = sorted(ratio_table(ratios, ()).splitlines()[1:], reverse=True)
    assert "met" not in known
    assert "missed" not in known
    assert "≥ 0.85" in missed
    assert "missed" in missed


def test_samples_to_the_target_are_compared_seed_by_seed() -> None:
    fixed = {"workload": "digits", "heterogeneity": "b", "target": "accuracy ≥ 0.9"}
    values = {
        ("preduce", 0): 110,
        ("all_reduce", 0): 100,
        ("preduce", 1): None,
        ("all_reduce", 1): 100,
        ("preduce", 2): 5,
    }
    rows = [{**fixed, "what": w, "repeat": r, "samples_to_target": s} for (w, r), s in values.items()]
    (ratio,) = partial_reduce.ratios({"training": rows}).values()
    assert (ratio["low"], ratio["high"]) == (1.1, math.inf)


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(ConfigurationError, match="'virtul' is not a part of suite=partial_reduce; there are virtual"):
        partial_reduce.run(**suite("suite.only=[virtul]"))
