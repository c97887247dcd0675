"""What the suites of trainings plan, and what they make of what workers report."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import NoSync
from recipes.baselines.references import REFERENCES
from recipes.suites import convergence, epochs, machine, throughput
from recipes.suites.grid import Case
from recipes.suites.probe import Report, Used
from recipes.suites.trainings import Named, Training, strategy_of
from tests.recipes.composed import parameters_of

suite = partial(parameters_of, "throughput")


def planned(panel: str, *overrides: str) -> list[Case]:
    parameters = suite(*overrides)
    known = {name: parameters[name] for name in ("methods", "heterogeneity", "workloads")}
    return list(throughput.plan(panel, parameters["grid"][panel], known, parameters["seed"]))


@pytest.mark.parametrize("panel", sorted(suite()["grid"]))
def test_every_part_of_the_grid_can_be_built(panel: str) -> None:
    part, found = suite()["grid"][panel], planned(panel, "seed=7")
    measured = part["repeats"] * len(part["heterogeneity"]) - (part["repeats"] - 1) * len(part["once"])
    assert len(found) == measured * len(part["methods"])
    for columns, case in found:
        assert case.seed == 7 + columns["repeat"]
        if case.method.name not in REFERENCES:
            strategy_of(case)


@pytest.mark.parametrize(
    ("panel", "asked", "message"),
    [
        ("flush", "grid.flush.heterogeneity=[trace]", r"bare_torch .* suite\.grid\.flush\.methods"),
        ("flush", "heterogeneity.b.draws=pass", r"bare_torch .* suite\.grid\.flush\.methods"),
        ("real", "grid.real.methods=[bare_torch]", r"bare_torch.* suite\.grid\.real\.methods"),
        ("flush", "grid.flush.methods=[lightning_ddp]", r"lightning_ddp.* suite\.grid\.flush\.methods"),
        ("flush", "grid.flush.methods=[magic]", r"'magic' is not among suite\.methods; there are .*sdpipe"),
        ("flush", "grid.flush.magic=1", r"suite\.grid\.flush has workload=emulated.* magic"),
    ],
)
def test_what_cannot_be_measured_is_refused(panel: str, asked: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        planned(panel, f"++suite.{asked}")


@pytest.mark.parametrize(("schedule", "slots"), [("1f1b", 4 + 3), ("pipedream", 4)])
def test_the_bound_is_that_of_whole_mini_batches(schedule: str, slots: int) -> None:
    nothing = Named("none", {"_target_": "lightning_sdpipe.heterogeneity.Delays"})
    case = Training(
        method=nothing,
        condition=nothing,
        num_stages=4,
        num_pipelines=4,
        num_micro_batches=4,
        schedule=schedule,
        batches=8000,
        block_seconds=0.025,
        seed=0,
    )
    assert throughput.bound(case, NoSync()) == pytest.approx(4 / (slots * 0.025), rel=0.01)
    assert throughput.bound(case, AllReduceModels()) == pytest.approx(4 / (slots * 0.025), rel=0.01)


@pytest.mark.parametrize(("processor", "scale"), [(0.01, 1.0), (0.08, 1.0), (0.12, 1.5), (0.121, 1.6), (0.48, 6.0)])
def test_times_are_stretched_until_the_cores_are_less_than_half_busy(processor: float, scale: float) -> None:
    assert machine.needed_scale(processor, 0.1, 2) == pytest.approx(scale)


def test_a_summary_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)

    def report(stage: int, pipeline: int, clock: float) -> Report:
        before, used = Used(9.0, 9.0), Used(clock, 0.5, 0.4 * clock, 0.1 * clock, 0.2 * clock, 0.05 * clock, 10, 20)
        after = Used(*(a + b for a, b in zip(before, used, strict=True)))
        return Report(stage, pipeline, [before] * 5 + [after] * 10)

    found = throughput.summary([report(stage, pipe, 1.0 + pipe) for pipe in (0, 1) for stage in (0, 1)], 5, 8)
    assert found["samples_per_s"] == pytest.approx(8 * (10 / 1.0 + 10 / 2.0))
    assert (found["group_size"], found["busy"]) == (2.0, pytest.approx(4 * 0.5 / (2 * 2.0)))
    assert sum(found[share] for share in throughput.SHARES) == pytest.approx(1.0)
    assert [(w["stage"], w["pipeline"]) for w in found["workers"]] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_each_goal_of_epochs_has_its_trainings() -> None:
    of = parameters_of("epochs")
    known = {name: of[name] for name in ("methods", "heterogeneity")}
    rows = [case.columns for part in of["grid"].values() for case in epochs.plan(part, known, 0)]
    for goal in epochs.GOALS.values():
        for side in (goal.above, goal.below):
            assert isinstance(side, str) or [row for row in rows if side.items() <= row.items()], goal


@pytest.mark.parametrize(
    ("curve", "reached"),
    [
        ([(1, 10, 0.5), (2, 20, 0.9), (3, 30, 0.8)], (1.75, 17.5)),
        ([(1, 10, 0.9), (2, 20, 0.5)], (1, 10)),
        ([(1, 10, 0.5), (2, 20, 0.7)], None),
    ],
)
def test_the_target_is_reached_between_points(curve: Any, reached: Any) -> None:
    expected = None if reached is None else pytest.approx(reached)
    assert convergence.to_target(curve, 0.8) == expected
    losses = [(seconds, samples, 1 - value) for seconds, samples, value in curve]
    assert convergence.to_target(losses, 1 - 0.8, falls=True) == expected


def test_learning_is_compared_seed_by_seed() -> None:
    def row(method: str, repeat: int, slower: float, final: float) -> dict[str, Any]:
        where = {"part": "headline", "task": "pictures", "heterogeneity": "static", "rate": 1.0, "what": method}
        curve = [[slower * 100.0 * k, 1000.0 * k, final * k / 5] for k in range(1, 6)]
        return {**where, "repeat": repeat, "final": final, "samples": 5000.0, "curve": curve}

    rows = [row("all_reduce", r, 2.0, 0.9) for r in range(3)] + [
        row("sdpipe", r, 1.0, 0.9 + 0.01 * r) for r in range(3)
    ]
    convergence.note_targets(rows)
    assert [each["target"] for each in rows] == pytest.approx([0.72] * 6)
    about = {"goal": -0.3, "metric": "accuracy"}
    found = convergence.ratios(rows, {"pictures": about})
    assert {key: pytest.approx(each["value"]) for key, each in found.items()} == {
        "final/pictures/static": 1.0,
        "samples/pictures/static": math.prod(0.9 / (0.9 + 0.01 * r) for r in range(3)) ** (1 / 3),
        "time/pictures/static": 2.0 * math.prod((0.9 + 0.01 * r) / 0.9 for r in range(3)) ** (1 / 3),
        "rate/pictures/static": 2.0,
    }
    of_losses = convergence.ratios(rows, {"pictures": {**about, "metric": convergence.LOSS}})
    assert of_losses["final/pictures/static"]["value"] == pytest.approx(-1.0 / 0.9)  # per cent
    final = found["final/pictures/static"]
    assert (final["low"], final["high"]) == pytest.approx((1 - 4.303 / 3**0.5, 1 + 4.303 / 3**0.5))
    assert final["meaning"].endswith("; 3 seeds, interval of 95 %")
    rows[3] = row("sdpipe", 0, 1.0, 0.5)  # never reaches the target
    convergence.note_targets(rows)
    found = convergence.ratios(rows, {"pictures": about})
    assert (found["samples/pictures/static"]["high"], found["time/pictures/static"]["low"]) == (math.inf, 0.0)
    assert found["samples/pictures/static"]["meaning"].endswith("; 3 seeds, median and extremes")
    rows[0] = row("all_reduce", 0, 2.0, 0.1)  # nor does all-reduce
    convergence.note_targets(rows)
    found = convergence.ratios(rows, {"pictures": about})
    assert found["samples/pictures/static"]["meaning"].endswith("; 2 seeds, interval of 95 %")
