"""The suite of unlike depths: the pipelines that it trains, its ratios, and one small real run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import Slowed, Static
from recipes.suites import ragged, trainings
from recipes.suites.cases import Named, RealCase
from recipes.suites.ragged.fleets import Shape
from recipes.suites.ragged.trainings import Training
from tests.recipes.composed import parameters_of

suite = partial(parameters_of, "ragged")
SMALL = ("+debug=ragged_debug",)


def planned(part: str) -> list[Training]:
    of = suite()
    model = of["model"]
    sizes = model["blocks"], model["num_micro_batches"], of["cut"], of["kept"]
    return list(ragged.plan(part, of["fleets"], *sizes, of["conditions"]))


@pytest.mark.parametrize(
    ("fleet", "cuts", "other", "left_out", "gain"),
    [
        ("1+4", "[12] [6, 6] [6, 6]", "[4, 8] [4, 8]", 1, 1.37),
        ("5", "[6, 6] [4, 4, 4]", "[6, 6] [6, 6]", 1, 1.16),
        ("2+4", "[12] [12] [6, 6] [6, 6]", "[6, 6] [6, 6] [6, 6]", 0, 1.07),
        ("1+1+1", "[12] [8, 4]", "[2, 4, 6]", 0, 1.23),
        ("1+2+2", "[12] [6, 6] [6, 6]", "[4, 8] [4, 8]", 1, 1.29),
    ],
)
def test_the_fleets_and_their_best_rectangles(fleet: str, cuts: str, other: str, left_out: int, gain: float) -> None:
    own = [asked for asked in planned("fleets") if asked.fleet == fleet]
    (rectangle,) = {asked.shape for asked in own if asked.mesh == "rectangle"}
    (unlike,) = {asked.shape.cuts: asked.shape for asked in own if asked.mesh == "ragged"}.values()
    assert (str(unlike), unlike.left_out, str(rectangle), rectangle.left_out) == (cuts, 0, other, left_out)
    assert unlike.rate / rectangle.rate == pytest.approx(gain, abs=0.005)
    assert (unlike.alike, rectangle.alike) == (False, True)


def test_ranks_have_the_speeds_of_their_devices() -> None:
    """The last stage of a pipeline comes first."""
    (shape,) = {a.shape.cuts: a.shape for a in planned("fleets") if a.fleet == "1+1+1" and a.mesh == "ragged"}.values()
    assert shape.factors == pytest.approx((1.0, 1 / 0.45, 1 / 0.75))  # 8 blocks of the first stage on the faster one


def test_the_options_are_those_that_a_user_gives() -> None:
    assert Shape(((12,), (6, 6)), (1.0,) * 3).options == {"num_stages": [1, 2], "partition": [[12], [6, 6]]}
    assert Shape(((6, 6),) * 2, (1.0,) * 4).options == {"num_stages": 2, "partition": [6, 6]}


def row(what: str, fleet: str, repeat: int, seconds: float, condition: str = "none") -> dict[str, Any]:
    named = {"what": what, "fleet": fleet, "heterogeneity": condition, "repeat": repeat, "epoch_s": seconds}
    return {**named, "batches_per_s": 60 / seconds, "sum_of_speeds": 3.0, "predicted_per_s": 2.8}


def test_every_ratio_is_of_the_same_repeat() -> None:
    rows = [row("ragged sdpipe", "1+4", 0, 25.0), row("ragged sdpipe", "1+4", 1, 24.0)]
    rows += [row("rectangle sdpipe", "1+4", 1, 36.0), row("rectangle sdpipe", "1+4", 0, 30.0)]
    rows += [row("ragged nosync", "1+4", 0, 20.0), row("rectangle nosync", "1", 0, 24.0)]
    found = ragged.ratios(rows)
    assert (found["rectangle/1+4"]["low"], found["rectangle/1+4"]["high"]) == (1.2, 1.5)
    assert found["nosync/1+4/none"]["value"] == 0.8
    assert found["bound/1+4"]["high"] == pytest.approx(60 / 24 / 3)
    assert found["place/1+4"]["value"] == pytest.approx(1 - 2.5 / 3), "one device makes 2.5 of 2.8 as well"
    assert set(found) == {"rectangle/1+4", "nosync/1+4/none", "bound/1+4", "place/1+4"}


def test_each_goal_has_its_trainings() -> None:
    rows = [
        row(f"{a.mesh} {a.method}", a.fleet, 0, 10.0, a.condition)
        for part in ("1", "fleets", "all_reduce", "same")
        for a in planned(part)
    ]
    found = ragged.ratios(rows)
    fleets = suite()["fleets"]
    expected = {f"rectangle/{name}" for name in fleets} | {
        f"nosync/{name}/{c}" for name in fleets for c in ("none", "b")
    }
    expected |= {f"{key}/{name}" for name in fleets for key in ("bound", "place")}
    assert set(found) == expected | {"same/2x3", "all_reduce/1+4", "all_reduce/1+4/by_speed"}


def test_samples_are_compared_seed_by_seed() -> None:
    def reached(mesh: str, repeat: int, taken: float | None) -> dict[str, Any]:
        return {
            **{"what": f"{mesh} sdpipe", "workload": "digits", "repeat": repeat, "samples_to_target": taken},
            "target": "accuracy ≥ 0.95",
        }

    rows = [reached("ragged", 0, 110.0), reached("rectangle", 0, 100.0), reached("ragged", 1, None)]
    rows += [reached("rectangle", 1, 100.0), reached("ragged", 2, 50.0), reached("rectangle", 2, None)]
    found = ragged.samples_ratios(rows)["samples/digits"]
    assert (found["low"], found["high"]) == (1.1, float("inf"))


def test_real_cases_may_have_unlike_depths() -> None:
    speeds = {"_target_": "lightning_sdpipe.heterogeneity.Static", "factors": [1.0, 2.0, 2.0]}
    workload = Named("digits", suite()["workloads"]["digits"])
    method = Named("sdpipe", suite()["methods"]["sdpipe"])
    case = RealCase(
        "ragged", method, Named("static", speeds), 2, 2, "1f1b", 2, 4, 0, 1.0, 1, workload, 6.0, depths=[1, 2]
    )
    assert (case.shape, case.workers) == ("1+2", 3)
    assert case.slowness == Slowed(Static([1.0, 2.0, 2.0]), 6.0)
    strategy = trainings.strategy(case)
    assert strategy.options.depths == (1, 2)  # type: ignore[attr-defined]


@pytest.mark.distributed
def test_a_small_run() -> None:
    parameters = suite(*SMALL, "suite.only=[fleets]", 'suite.measured=["1+1+1"]')
    parameters["model"] |= {"batch_seconds": 0.04, "batches": 8, "validation_batches": 2}
    rows, found = ragged.run(**parameters)
    assert [row["what"] for row in rows] == ["rectangle nosync", "ragged sdpipe", "ragged nosync", "rectangle sdpipe"]
    assert [row["pipelines"] for row in rows] == ["[12]", "[12] [8, 4]", "[12] [8, 4]", "[2, 4, 6]"]
    assert all(0 < row["batches_per_s"] < row["sum_of_speeds"] for row in rows)
    assert set(found) == {"nosync/1+1+1/none"} | {f"{key}/1+1+1" for key in ("rectangle", "bound", "place", "search")}


def test_what_there_is_not_is_refused() -> None:
    for asked, message in (
        ({"only": ["fleet"]}, "'fleet' is not a part of suite=ragged"),
        ({"measured": ["9"]}, r"'9' is not among suite\.fleets"),
        ({"conditions": ["magic"]}, r"'magic' is not among suite\.heterogeneity"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            ragged.run(**{**suite(), **asked})
