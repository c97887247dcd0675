"""The convergence suite: targets, ratios, and models put together from snapshots of a small real run."""

from __future__ import annotations

import json
import math
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sdpipe.errors import ConfigurationError
from recipes.suites import convergence, figures
from recipes.suites.convergence import snapshots
from recipes.suites.convergence.snapshots import Snapshot
from tests.recipes.composed import parameters_of

suite = partial(parameters_of, "convergence")


@pytest.mark.parametrize(
    ("curve", "target", "rising", "reached"),
    [
        ([(1, 10, 0.5), (2, 20, 0.9), (3, 30, 0.8)], 0.8, True, (1.75, 17.5)),
        ([(1, 10, 0.9), (2, 20, 0.5)], 0.8, True, (1, 10)),
        ([(1, 10, 0.5), (2, 20, 0.7)], 0.8, True, None),
        ([(1, 10, 6.0), (2, 20, 5.0)], 5.0, False, (2, 20)),
        ([(1, 10, 6.0), (3, 30, 4.0)], 5.5, False, (1.5, 15)),
    ],
)
def test_the_target_is_reached_between_points(curve: Any, target: float, rising: bool, reached: Any) -> None:
    found = convergence.to_target(curve, target, rising)
    assert found == (None if reached is None else pytest.approx(reached))


def row(method: str, repeat: int, seconds: float | None, samples: float | None, final: float) -> dict[str, Any]:
    return {
        **{"what": method, "workload": "digits", "heterogeneity": "b", "repeat": repeat, "target": "accuracy ≥ 0.9"},
        **{"seconds_to_target": seconds, "samples_to_target": samples, "final": final, "rising": True},
        "curve": [(1.0, 10, 0.5), (2.0, 20, final)],
    }


def test_ratios_compare_the_same_seeds() -> None:
    rows = [row("sdpipe", r, s, 100, f) for r, (s, f) in enumerate(((1.0, 0.95), (2.0, 0.96), (1.5, 0.97)))]
    rows += [row("all_reduce", r, s, 110, f) for r, (s, f) in enumerate(((3.0, 0.95), (4.0, 0.97), (3.0, 0.99)))]
    found = convergence.ratios(rows)
    assert {key: pytest.approx(value["value"]) for key, value in found.items()} == {
        "samples/digits/b": 100 / 110,
        "time/digits/b": 2.0,
        "final/digits/b": -0.01 / 0.02,
    }
    without_flush = [{**row, "what": "sdpipe_without_flush"} for row in rows[:3]]
    both = convergence.ratios(rows + without_flush)
    assert {key.removesuffix("/without_flush"): value["value"] for key, value in both.items() if key not in found} == {
        key: value["value"] for key, value in found.items()
    }
    assert (found["time/digits/b"]["low"], found["time/digits/b"]["high"]) == (2.0, 3.0)


def test_one_bit_adam_stands_beside_adam_without_a_goal() -> None:
    rows = [row("all_reduce", 0, 1.0, 100, 0.9), row("one_bit_adam_published", 0, None, None, 0.1)]
    found = convergence.ratios([*rows, row("one_bit_adam", 0, 1.0, 120, 0.9)])
    expected = {"one_bit_adam/digits/b": 1.2, "one_bit_adam_published/digits/b": math.inf}
    assert {key: ratio["value"] for key, ratio in found.items()} == expected
    assert all(ratio["goal"] is None for ratio in found.values())


def test_who_never_reaches_the_target_is_infinitely_late() -> None:
    rows = [row("sdpipe", 0, None, None, 0.8), row("all_reduce", 0, 2.0, 100, 0.95)]
    rows += [row("sdpipe", 1, 1.0, 90, 0.95), row("all_reduce", 1, None, None, 0.8)]
    found = convergence.ratios(rows)
    assert (found["samples/digits/b"]["value"], found["time/digits/b"]["value"]) == (math.inf, 0.0)
    assert "1 seeds" in found["time/digits/b"]["meaning"]


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ("only=[digits,mine]", "experiments"),
        ("compared=[sdpipe,mine]", "methods"),
        ("conditions=[mine]", "heterogeneity"),
    ],
)
def test_unknown_names_are_refused_before_anything_is_measured(asked: str, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"'mine' is not among suite\.{kind}; there are "):
        convergence.run(**suite(f"suite.{asked}"))


def test_every_moment_has_the_last_snapshot_of_each_pipeline() -> None:
    written = [*(Snapshot(0, k, 10.0 + k, []) for k in range(5)), *(Snapshot(1, k, 10.5 + 2 * k, []) for k in range(5))]
    found = snapshots.moments(written, 4)  # from 10.5, when both were there, to 18.5
    assert [seconds for seconds, _ in found] == pytest.approx([2.0, 4.0, 6.0, 8.0])
    assert [[s.iterations for s in last] for _, last in found] == [[2, 1], [4, 2], [4, 3], [4, 4]]


def test_a_model_is_the_mean_of_its_pipelines() -> None:
    states = [
        {"w": torch.tensor([1.0, 3.0]), "n": torch.tensor(4)},
        {"w": torch.tensor([3.0, 5.0]), "n": torch.tensor(6)},
    ]
    mean = snapshots.mean_state(states)
    assert mean["w"].tolist() == [2.0, 4.0]
    assert mean["n"].item() == 6


def test_the_figures_have_a_line_per_seed(tmp_path: Path) -> None:
    rows = [row(method, repeat, 1.0, 10, 0.9) for method in ("sdpipe", "all_reduce") for repeat in range(2)]
    files = figures.convergence_figures(rows, tmp_path / "out.json")
    assert [file.name for file in files] == [f"out.convergence.digits.b.{kind}" for kind in ("png", "svg")]
    assert files[1].read_text().count(f"stroke: {figures.COLOURS['sdpipe']}") >= 4  # two panels of two seeds


@pytest.mark.distributed
def test_a_small_run_learns_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # fmt: off
    overrides = [
        f"json={tmp_path}/out.json", "suite.only=[digits]", "suite.conditions=[b]",
        "suite.compared=[sdpipe_without_flush]",
        "suite.repeats=1", "suite.points=3", "suite.scale=0.01", "suite.workloads.digits.model.channels=8",
        "suite.workloads.digits.model.depth=1", "suite.experiments.digits.num_pipelines=2",
        "suite.experiments.digits.iterations=24", "suite.experiments.digits.snapshot_every=6",
        "suite.experiments.digits.pace=1",
    ]
    # fmt: on
    parameters = suite(*overrides)
    (found,), ratios = convergence.run(**parameters)
    assert ratios == {}
    assert len(found["curve"]) == 3
    seconds, samples, accuracy = found["curve"][-1]
    assert samples == 24 * 2 * 32
    assert 0 < seconds < 60
    assert accuracy > 0.3  # chance is 0.1
    assert found["curve"][0][1] < samples
    json.dumps(found)
    assert (tmp_path / "out.convergence.digits.b.svg").exists()

    capsys.readouterr()
    assert convergence.run(**parameters)[0] == [found]
    assert "(0 s)" in capsys.readouterr().out
    _, _, *again = shlex.split(found["command"].removeprefix("python -m "))
    settings = suite(*again)
    for kind in ("experiments", "workloads"):
        assert settings[kind]["digits"] == parameters[kind]["digits"]
    assert (settings["scale"], settings["compared"], settings["points"]) == (0.01, ["sdpipe_without_flush"], 3)
    assert found["schedule"] == settings["schedules"]["sdpipe_without_flush"] == "pipedream"


def in_turn(*overrides: str) -> dict[str, Any]:
    """Three pipelines in one process."""
    small = ["model.channels=8", "model.depth=1", "model.momentum=0", "model.lr=0.2"]
    shape = ["num_stages=1", "num_pipelines=3", "num_micro_batches=1", "iterations=30"]
    return suite(
        "suite.one_process=true",
        "suite.only=[digits]",
        "suite.conditions=[none]",
        "suite.repeats=1",
        "suite.points=2",
        *(f"suite.workloads.digits.{setting}" for setting in small),
        *(f"suite.experiments.digits.{setting}" for setting in shape),
        *overrides,
    )


def test_replicas_in_one_process_that_always_meet_are_one_joint_batch() -> None:
    """As with plain SGD the mean of models after a step is the model after the mean gradient."""
    rows, _ = convergence.run(**in_turn("suite.compared=[sdpipe,all_reduce]", "suite.methods.sdpipe.window=inf"))
    models, gradients = (row["curve"] for row in rows)
    assert [point[1:] for point in models] == [pytest.approx(point[1:], rel=0.01) for point in gradients]
    assert [point[1] for point in models] == [15 * 3 * 32, 30 * 3 * 32]
    assert models[-1][2] > 0.3
    _, _, *again = shlex.split(rows[0]["command"].removeprefix("python -m "))
    assert suite(*again)["one_process"] is True


def test_one_process_trains_pipelines_of_one_stage_only() -> None:
    with pytest.raises(ConfigurationError, match="pipelines of one stage, not of 2"):
        convergence.run(**in_turn("suite.experiments.digits.num_stages=2"))
