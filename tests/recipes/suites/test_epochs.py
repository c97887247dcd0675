"""The suite of whole epochs: what it plans, its ratios, and one small real run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lightning_sdpipe.errors import ConfigurationError
from recipes.suites import epochs
from tests.recipes.composed import parameters_of

suite = partial(parameters_of, "epochs")


def row(what: str, condition: str, repeat: int, seconds: float) -> dict[str, Any]:
    named = {"what": what, "shape": "1x4", "micro_batches": 1, "heterogeneity": condition, "repeat": repeat}
    return {**named, "epoch_s": seconds, "samples_per_s": 140 / seconds, "sum_of_rates": 35.0}


def test_every_ratio_is_of_the_same_repeat() -> None:
    rows = [row(epochs.OURS, "static", 0, 4.0), row(epochs.OURS, "static", 1, 5.0)]
    rows += [row(epochs.ALL_REDUCE, "static", 1, 10.0), row(epochs.ALL_REDUCE, "static", 0, 6.0)]
    found = epochs.ratios(rows)
    assert set(found) == {"all_reduce/1x4/static", "bound/1x4/static"}
    assert (found["all_reduce/1x4/static"]["low"], found["all_reduce/1x4/static"]["high"]) == (1.5, 2.0)
    assert (found["bound/1x4/static"]["low"], found["bound/1x4/static"]["high"]) == (0.8, 1.0)


def test_each_goal_has_its_trainings() -> None:
    grid = suite()["grid"]
    planned = {
        (f"{part['num_stages']}x{part['num_pipelines']}", condition, what)
        for part in grid.values()
        for condition, what, _ in epochs.plan(part)
    }
    for key, (ours, other, _) in epochs.GOALS.items():
        _, shape, condition = key.split("/")
        assert {(shape, condition, ours), (shape, condition, other)} <= planned


@pytest.mark.distributed
def test_a_small_run() -> None:
    small = [f"grid.devices.{option}" for option in ("num_pipelines=2", "batch_seconds=0.02", "batches=6", "epochs=1")]
    small += ["grid.devices.repeats=1", "heterogeneity.static.factors=[1.0,3.0]", "only=[devices]"]
    parameters = suite(*(f"suite.{option}" for option in small))
    trained = ["sdpipe/dealt", "all_reduce/sharded", "all_reduce/by_speed"]
    parameters["grid"]["devices"] |= {"conditions": {"static": trained}, "num_micro_batches": 2}
    rows, found = epochs.run(**parameters)
    assert [row["what"] for row in rows] == trained
    assert rows[0]["sum_of_rates"] == pytest.approx(2 / 0.02 + 2 / 0.06)
    assert all(0 < row["samples_per_s"] < row["sum_of_rates"] for row in rows)
    assert found == {}  # goals are for four devices


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'grids' is not a part of suite=epochs"):
        epochs.run(**{**suite(), "only": ["grids"]})
