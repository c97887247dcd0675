"""suite=phd, much shortened: what it reports, what it draws, and that models follow the decisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.simulate import Work, simulate
from recipes.suites import phd
from recipes.suites.phd.training import Task, accuracy_at, reached, train

TASK = Task(hidden=16, batch_size=16, lr=0.05, momentum=0.9, target=0.5, points=10)


def test_it_reports_every_ratio_and_draws_every_figure(tmp_path: Path) -> None:
    rows, ratios = phd.run(
        times=[0.1, 0.2],
        group_sizes=[2],
        iterations=30,
        jitter=0.05,
        staleness=4,
        megabytes=98,
        training={"hidden": 16, "batch_size": 16, "lr": 0.05, "momentum": 0.9, "target": 0.5, "points": 20},
        bounds={"stages": [1], "pipelines": 2, "iterations": 10, "bounds": [2]},
        repeats=2,
        output=str(tmp_path / "phd.json"),
        seed=0,
    )
    families = {*phd.GOALS, "lag", "phd_samples", "phd_final"}
    assert set(ratios) == {f"{family}/2x2" for family in families}
    assert ratios["lag/2x2"]["high"] <= 1
    assert {row["what"] for row in rows} >= {"phd", "sdpipe", "0.1 s with 0.2 s", "phd, bounded"}
    drawn = {file.name for file in tmp_path.iterdir()}
    assert drawn == {
        f"phd.phd.{figure}.{kind}"
        for figure in ("learning", "throughput", "all_reduce", "lag")
        for kind in ("png", "svg")
    }


def test_models_follow_the_decisions() -> None:
    """With everybody in every group the mean model is each one's, whose noise is less than that of models apart."""
    work = Work(1, 4, 60, 1.0)
    together, apart = (train(simulate(config, work), TASK, 0) for config in (AllReduceModels(), NoSync()))
    assert [point[:2] for point in together] == [point[:2] for point in apart]
    assert together[-1][2] > 0.85
    assert together != apart
    assert together == train(simulate(AllReduceModels(), work), TASK, 0)


def test_one_pipeline_is_plain_training() -> None:
    work = Work(1, 1, 60, 1.0)
    assert train(simulate(AllReduceModels(), work), TASK, 3) == train(simulate(NoSync(), work), TASK, 3)
    slower = replace(TASK, lr=0.0)
    still = train(simulate(NoSync(), work), slower, 3)
    assert len({point[2] for point in still}) == 1


def test_a_target_is_reached_for_good_or_not_at_all() -> None:
    curve = [(1.0, 16, 0.2), (2.0, 32, 0.9), (3.0, 48, 0.3), (4.0, 64, 0.9), (5.0, 80, 0.9), (6.0, 96, 0.9)]
    assert reached(curve, 0.75) == (5.0, 80, 0.9)
    assert reached(curve, 0.95) is None
    assert accuracy_at(curve, 64) == pytest.approx(0.9)
