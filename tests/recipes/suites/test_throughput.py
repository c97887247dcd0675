"""The throughput suite: what it plans, how it sums up, and one small real run that is resumed."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgba

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import Delays, Trace
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import NoSync
from recipes.suites import cases, figures, machine, throughput, trainings
from recipes.suites.worker_reports import SHARES, Counters, WorkerReport, summary
from tests.recipes.composed import parameters_of

suite = partial(parameters_of, "throughput")

PIPEDREAM = {"pipedream": 3.0, "headline": 5.0}


def planned(panel: str, *overrides: str) -> list[tuple[Any, int]]:
    parameters = suite(*overrides)
    names = ("methods", "heterogeneity", "workloads")
    specifications = {name: parameters[name] for name in names}
    return list(throughput.plan(panel, parameters["grid"][panel], specifications, parameters["seed"]))


def row(method: str, condition: str, repeat: int, speed: float, **other: Any) -> dict[str, Any]:
    fixed = {"panel": "flush", "workload": "emulated", "shape": "4x4", "schedule": "1f1b", "group_size": 2.0}
    return {
        **{"what": method, "heterogeneity": condition, "repeat": repeat, "samples_per_s": speed, "busy": 0.3},
        **fixed,
        **dict.fromkeys(SHARES, 0.2),
        **{"bound": 2 * speed, "all_reduce_bound": speed},
        **other,
    }


@pytest.mark.parametrize("panel", sorted(suite()["grid"]))
def test_every_part_of_the_grid_can_be_built(panel: str) -> None:
    found = planned(panel, "seed=7")
    part = suite()["grid"][panel]
    measured = part["repeats"] * len(part["heterogeneity"]) - (part["repeats"] - 1) * len(part["once"])
    assert len(found) == measured * len(part["methods"])
    for case, repeat in found:
        assert case.seed == 7 + repeat
        if case.method.name != "bare_torch":
            trainings.strategy(case)
        if isinstance(case.slowness, Delays):
            assert case.slowness.seed == 7 + repeat
        if isinstance(case, cases.EmulatedCase):
            assert case.iteration_seconds == pytest.approx(0.057 if panel == "headline" else 0.1, rel=0.01)


@pytest.mark.parametrize("asked", ["grid.flush.heterogeneity=[trace]", "heterogeneity.b.draws=pass"])
def test_outside_references_are_only_asked_for_delays_that_they_can_be_given(asked: str) -> None:
    with pytest.raises(ConfigurationError, match=r"bare_torch .* suite\.grid\.flush\.methods"):
        planned("flush", f"suite.{asked}")
    assert planned("flush", f"suite.{asked}", "suite.grid.flush.methods=[sdpipe,nosync]")


def test_methods_take_turns_under_the_same_delays() -> None:
    found = planned("flush")
    by_repeat = [[c.method.name for c, r in found if r == repeat and c.condition.name == "b"] for repeat in range(3)]
    assert [methods[0] for methods in by_repeat] == suite()["grid"]["flush"]["methods"][:3]
    assert {frozenset(methods) for methods in by_repeat} == {frozenset(by_repeat[0])}
    for repeat in range(3):
        assert len({str(c.slowness) for c, r in found if r == repeat and c.condition.name == "b"}) == 1


def test_outside_references_are_only_asked_for_what_they_can_compute() -> None:
    for panel, method in (("real", "bare_torch"), ("real", "lightning_ddp"), ("flush", "lightning_ddp")):
        with pytest.raises(ConfigurationError, match=rf"{method}.* leave it out of suite\.grid\.{panel}\.methods"):
            planned(panel, f"suite.grid.{panel}.methods=[{method}]")


def test_settings_of_another_workload_are_named() -> None:
    with pytest.raises(
        ConfigurationError, match=r"suite\.grid\.flush has workload=digits.* micro_batch_seconds, num_p"
    ):
        planned("flush", "suite.grid.flush.workload=digits")


def test_unknown_parts_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(ConfigurationError, match=r"'all' is not among suite\.grid; there are flush, "):
        throughput.run(**suite("suite.only=[flush,all]"))


def test_unknown_methods_and_conditions_are_named() -> None:
    for override in ("suite.grid.flush.methods=[magic]", "suite.grid.flush.heterogeneity=[magic]"):
        with pytest.raises(ConfigurationError, match=r"'magic' is not among suite\.\w+; there are .*(sdpipe|none)"):
            planned("flush", override)


@pytest.mark.parametrize("panel", sorted(suite()["grid"]))
def test_the_command_of_a_row_plans_the_same_case(panel: str) -> None:
    found = planned(panel, "suite.methods.sdpipe.window=0.25", "suite.heterogeneity.b.probability=0.5")
    given = replace(
        next(c for c, _ in reversed(found) if (c.method.name, c.condition.name) == ("sdpipe", "b")), scale=1.5
    )
    program, _, *overrides = shlex.split(cases.command(given).removeprefix("python -m "))
    assert program == "recipes.bench"
    ((again, repeat),) = planned(panel, *overrides)
    assert (repeat, suite(*overrides)["only"]) == (0, [panel])
    same = replace(given.condition, specification={**given.condition.specification, "seed": given.seed})
    assert replace(again, scale=suite(*overrides)["scale"]) == replace(given, condition=same)


def test_delays_are_scaled_and_speeds_are_not() -> None:
    case = replace(planned("flush", "suite.grid.flush.heterogeneity=[b]")[0][0], scale=1.5)
    assert case.slowness == Delays(probability=0.1, seconds=0.3, scale=1.5)
    assert case.iteration_seconds == pytest.approx(0.15, rel=1e-3)
    trace = replace(planned("pipedream", "suite.grid.pipedream.heterogeneity=[trace]")[0][0], scale=1.5)
    assert trace.slowness == Trace(time_scale=0.1)
    assert trace.bound(NoSync()) > trace.bound(AllReduceModels()) > 0


def test_bounds_count_the_measured_iterations_only() -> None:
    case = replace(planned("flush", "suite.grid.flush.heterogeneity=[b]")[0][0], iterations=200, warm_up=50)
    assert case.bound(NoSync()) / case.bound(AllReduceModels()) == pytest.approx(1.7, rel=0.1)
    assert replace(case, warm_up=0).bound(NoSync()) != case.bound(NoSync())
    undisturbed = replace(case, condition=planned("flush", "suite.grid.flush.heterogeneity=[none]")[0][0].condition)
    assert undisturbed.bound(NoSync()) == pytest.approx(4 / case.iteration_seconds)
    assert replace(case, schedule="zero_bubble").bound(NoSync()) is None


@pytest.mark.parametrize(("processor", "scale"), [(0.01, 1.0), (0.08, 1.0), (0.12, 1.5), (0.121, 1.6), (0.48, 6.0)])
def test_times_are_stretched_until_the_cores_are_less_than_half_busy(processor: float, scale: float) -> None:
    assert machine.needed_scale(processor, 0.1, 2) == pytest.approx(scale)


def test_a_summary_adds_up() -> None:
    def report(stage: int, pipeline: int, clock: float) -> WorkerReport:
        used = Counters(clock, 0.5, 0.4 * clock, 0.1 * clock, 0.2 * clock, 0.05 * clock, 10, 20)
        return WorkerReport(stage, pipeline, 10, used, (15, 2.0 + pipeline))

    found = summary([report(stage, pipeline, 1.0 + pipeline) for pipeline in (0, 1) for stage in (0, 1)], 8, 2)
    assert found["samples_per_s"] == pytest.approx(8 * (10 / 1.0 + 10 / 2.0))
    assert found["visible_samples_per_s"] == pytest.approx(8 * 2 * 15 / 3.0)
    assert found["iteration_ms"] == pytest.approx(1e3 / 7.5)
    assert found["group_size"] == 2.0
    assert sum(found[share] for share in SHARES) == pytest.approx(1.0)
    assert found["pipeline_wait"] == pytest.approx(0.25)
    assert found["busy"] == pytest.approx(4 * 0.5 / (2 * 2.0))
    assert found["processor_s"] == pytest.approx(0.2)
    assert [(w["stage"], w["pipeline"]) for w in found["workers"]] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_ratios_are_those_of_the_same_repeat() -> None:
    rows = [row("sdpipe", "b", r, s) for r, s in enumerate((10.0, 20.0, 33.0))]
    rows += [row("all_reduce", "b", r, s) for r, s in enumerate((10.0, 10.0, 11.0))]
    rows += [row("sdpipe", "none", 0, 40.0), row("nosync", "b", 1, 25.0)]
    rows += [row("sdpipe", "b", 0, 9.0, panel="pipedream", schedule="pipedream")]
    rows += [row("nosync", "b", 0, 10.0, panel="pipedream", schedule="pipedream")]
    found = throughput.ratios(rows)
    assert set(found) == {"all_reduce/4x4/b", "nosync/4x4/b", "nosync/4x4/b/pipedream"}
    assert (found["all_reduce/4x4/b"]["value"], found["all_reduce/4x4/b"]["low"]) == (2.0, 1.0)
    assert "room for 2.00" in found["all_reduce/4x4/b"]["meaning"]
    assert found["nosync/4x4/b"]["value"] == 0.8
    assert found["nosync/4x4/b/pipedream"]["value"] == 0.9
    ours = next(s for s in throughput.summarise(rows) if s["what"] == "sdpipe, median" and s["heterogeneity"] == "b")
    assert (ours["samples_per_s"], ours["low"], ours["high"]) == (20.0, 10.0, 33.0)
    assert (ours["over_all_reduce"], ours["of_nosync"], ours["slowdown"]) == (2.0, 0.8, 4.0)


def test_the_headline_compares_parts_of_the_grid() -> None:
    rows = [row("sdpipe", "b", 0, 30.0), row("sdpipe", "none", 0, 60.0), row("all_reduce", "b", 0, 15.0)]
    rows += [row("sdpipe", c, 0, s, panel="headline", schedule="pipedream") for c, s in (("b", 60.0), ("none", 84.0))]
    found = throughput.headline(throughput.summarise(rows))
    assert [(r["over"], r["both_with_flush"], r["sdpipe_without_flush"]) for r in found] == [
        ("all_reduce", 2.0, 4.0),
        ("none, slowdown", 2.0, pytest.approx(1.4)),
    ]


def test_the_formula_is_that_of_the_design() -> None:
    (found,) = [r for r in throughput.possible([(4, 4)], [3], 4) if r["draws_per"] == "iteration"]
    assert found["all_reduce_slowdown"] == pytest.approx(1 + 3 * (1 - 0.9**16))
    assert found["speedup_flush"] == pytest.approx(1.7, rel=0.01)
    assert found["speedup_no_flush"] == pytest.approx(found["all_reduce_slowdown"] * 7 / 4 / (1 + 3 * 7 / 4 * 0.1))


def test_figures_show_every_method(tmp_path: Path) -> None:
    rows = [
        row(method, condition, 0, speed, shape=shape, panel=shape)
        for shape in ("4x4", "4x16")
        for condition in ("none", "b")
        for method, speed in (("sdpipe", 4.0), ("hetpipe", 2.0))
    ]
    files = figures.throughput_figures(throughput.summarise(rows), tmp_path / "out.json")
    assert sorted(file.name for file in files) == [
        f"out.{name}.{kind}" for name in ("scale", "throughput") for kind in ("png", "svg")
    ]
    assert all(file.stat().st_size > 1000 for file in files)
    faster = figures.speedups(throughput.summarise(rows))
    assert {r["speedup"] for r in faster if r["what"] == "sdpipe, median"} == {2.0}
    assert {r["heterogeneity"] for r in faster} == {"none, over hetpipe", "b, over hetpipe"}


def test_a_method_has_one_colour_and_the_legend_covers_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, *_: drawn.append(figure) or [])
    panels = {"flush": ("bare_torch", "mine", "sdpipe"), "data_parallel": ("sdpipe", "lightning_ddp", "mine")}
    rows = [row(m, "b", 0, 1.0, panel=panel, shape=panel) for panel, methods in panels.items() for m in methods]
    figures.throughput_figures(throughput.summarise(rows), tmp_path / "out.json")
    (figure,) = drawn
    figure.canvas.draw()
    (legend,) = figure.legends
    handles = zip(legend.get_texts(), legend.get_patches(), strict=True)
    colours = {text.get_text(): patch.get_facecolor() for text, patch in handles}
    assert colours["sdpipe"] == pytest.approx(to_rgba(figures.COLOURS["sdpipe"]))
    assert len(set(colours.values())) == len({"sdpipe", "lightning_ddp", "bare_torch", "mine"})
    for axis, methods in zip(figure.axes, panels.values(), strict=True):
        assert [bar.get_facecolor() for bar in axis.patches] == [colours[method] for method in methods]
        assert axis.get_legend() is None
        assert not legend.get_window_extent().overlaps(axis.get_window_extent())


def test_the_headline_is_not_drawn_over_the_comparison(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, *_: drawn.append(figure) or [])
    rows = [row("sdpipe", "b", 0, speed, schedule="pipedream", panel=panel) for panel, speed in PIPEDREAM.items()]
    figures.throughput_figures(throughput.summarise(rows), tmp_path / "out.json")
    (axis,) = drawn[0].axes
    assert [bar.get_height() for bar in axis.patches] == [PIPEDREAM["pipedream"]]
    assert figures.throughput_figures(throughput.summarise(rows[1:]), tmp_path / "alone.json") == []


@pytest.mark.distributed
def test_the_suite_runs_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # fmt: off
    small = {
        "num_stages": 2, "num_pipelines": 2, "num_micro_batches": 2, "micro_batch_seconds": 0.005, "iterations": 6,
        "warm_up": 3, "repeats": 1, "heterogeneity": "[b]", "methods": "[sdpipe,nosync,bare_torch]",
    }
    # fmt: on
    overrides = [f"suite.grid.flush.{name}={value}" for name, value in small.items()]
    parameters = suite(f"json={tmp_path}/out.json", "suite.only=[flush]", "suite.scale=1", "seed=4", *overrides)
    rows, _ = throughput.run(**parameters)
    ours, nosync, bare, *_ = rows
    assert [r["what"] for r in (ours, nosync, bare)] == ["sdpipe", "nosync", "bare_torch"]
    assert ours["injected_s"] == nosync["injected_s"] == bare["injected_s"] > 0
    for found in (ours, nosync, bare):
        assert found["samples_per_s"] > 0
        assert (found["visible_samples_per_s"] or 0) < found["samples_per_s"]
        assert (found["visible_samples_per_s"] is None) == (found["what"] == "bare_torch")
        assert len(found["workers"]) == 4
        assert found["compute"] > 0.01
        assert found["workload"] == "emulated"
    assert 1.0 <= ours["group_size"] <= 2.0
    assert nosync["group_size"] == 1.0
    assert (tmp_path / "out.throughput.svg").exists()

    capsys.readouterr()
    assert throughput.run(**parameters)[0] == rows  # nothing was measured again
    assert capsys.readouterr().out.count("(0 s)") == 3
