"""Throughput of the synchronisation methods under stragglers: the grid of SDPipe §5.2 and §5.4, in one run.

Rows say ``emulated`` where workers sleep instead of computing; everything else about them is real.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from lightning_sdpipe.errors import ConfigurationError
from recipes.suites import cases, machine, trainings
from recipes.suites.calibration import calibrated_scale
from recipes.suites.figures import require_matplotlib, throughput_figures
from recipes.suites.journal import Journal
from recipes.suites.ratios import Ratios, Row, quotients, ratio, refuse_unknown, rotated
from recipes.suites.worker_reports import SHARES

LOWER_IS_BETTER = frozenset[str]()

OURS = "sdpipe"
GOALS: dict[str, tuple[str, str, float]] = {
    "nosync/4x4/b": (OURS, "nosync", 0.90),
    "all_reduce/4x4/b": (OURS, "all_reduce", 1.4),
    "adpsgd/4x4/b": (OURS, "adpsgd", 1.2),
    "hetpipe/4x4/b": (OURS, "hetpipe", 1.0),
    "all_reduce/4x16/b": (OURS, "all_reduce", 2.0),
    "all_reduce/4x4/none": (OURS, "all_reduce", 0.98),
    "bare_torch/4x4/none": ("all_reduce", "bare_torch", 0.95),
    "bare_torch/4x4/b": ("all_reduce", "bare_torch", 0.95),
    "lightning_ddp/1x16/none": ("all_reduce", "lightning_ddp", 0.95),
    "lightning_ddp/1x16/b": ("all_reduce", "lightning_ddp", 0.95),
}
"""By the key of the ratio, without its schedule: what is divided by what, and what should come out at least."""

HEADLINE = {"all_reduce": 4.3, "adpsgd": 2.8}
"""The paper's largest speed-ups over these (§5.2)."""
HEADLINE_SLOWDOWN = 1.4
SHAPES = ((4, 4), (2, 8), (4, 16))
DELAY_RATIOS = (1, 3, 5, 10)
MICRO_BATCHES, PROBABILITY = 4, 0.1


def run(
    *,
    methods: Mapping[str, Any],
    heterogeneity: Mapping[str, Any],
    workloads: Mapping[str, Any],
    grid: Mapping[str, Mapping[str, Any]],
    only: Sequence[str],
    scale: float | None,
    output: str | None,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Run the parts of the grid that ``only`` names.

    Args:
        methods: specifications for Hydra, by name.
        heterogeneity: likewise.
        workloads: the ``model`` and ``data`` of each real workload, likewise.
        grid: by name, the fields of an :class:`~recipes.suites.cases.EmulatedCase` or a
            :class:`~recipes.suites.cases.RealCase`, with lists of ``methods`` and ``heterogeneity``, the number of
            ``repeats``, and the conditions that are measured ``once`` only.
        only: names of parts.
        scale: of emulated times, and of all delays; None to measure it.
        output: finished rows are kept beside this file, and figures are drawn there; None for neither.
        seed: of the first repeat; the following ones count up from it.

    Returns:
        One row per training, then one per method and condition with medians and ratios, the headline, and what the
        formula says; and the ratios with goals.
    """
    if output is not None:
        require_matplotlib()
    trainings.quiet()
    journal = Journal(None if output is None else Path(output).with_suffix(".rows.jsonl"), machine.setting())
    specifications = {"methods": methods, "heterogeneity": heterogeneity, "workloads": workloads}
    refuse_unknown("among suite.grid", only, grid)
    planned = [list(plan(panel, grid[panel], specifications, seed)) for panel in only]  # all, before any is measured
    rows: list[Row] = []
    for cases_of_panel in planned:
        factor = scale
        if factor is None:
            factor = calibrated_scale(cases_of_panel[0][0], methods["all_reduce"], heterogeneity["none"], journal)
        rows += [_measured(replace(case, scale=factor), repeat, journal) for case, repeat in cases_of_panel]
    summaries = summarise(rows)
    if output is not None:
        throughput_figures(summaries, Path(output))
    return [*rows, *summaries, *headline(summaries), *possible(SHAPES, DELAY_RATIOS, MICRO_BATCHES)], ratios(rows)


def plan(
    panel: str, part: Mapping[str, Any], specifications: Mapping[str, Mapping[str, Any]], seed: int
) -> Iterator[tuple[cases.AnyCase, int]]:
    """The cases of one part of the grid with their repeats, in the order in which they run.

    Raises:
        ConfigurationError: a method or a condition that is not among the specifications, or one that an outside
            reference cannot be given.
    """
    build = _builder(panel, part, specifications)
    for repeat in range(part["repeats"]):
        for condition in part["heterogeneity"]:
            if repeat and condition in part["once"]:
                continue
            for method in rotated(part["methods"], repeat):
                case = build(
                    method=cases.Named(method, None)
                    if method in cases.REFERENCES
                    else cases.named(specifications, "methods", method),
                    condition=cases.named(specifications, "heterogeneity", condition),
                    scale=1.0,
                    seed=seed + repeat,
                )
                if method in cases.REFERENCES:
                    cases.only_delays(case)
                yield case, repeat


def _builder(
    panel: str, part: Mapping[str, Any], specifications: Mapping[str, Mapping[str, Any]]
) -> Callable[..., cases.AnyCase]:
    """Make a case of a method, a condition, a scale and a seed."""
    settings = {
        name: value for name, value in part.items() if name not in ("methods", "heterogeneity", "repeats", "once")
    }
    workload = settings.pop("workload")
    kind = cases.EmulatedCase if workload == cases.EMULATED else cases.RealCase
    if unknown := settings.keys() - {field.name for field in fields(kind)}:
        raise ConfigurationError(
            f"suite.grid.{panel} has workload={workload}, which does not go with {', '.join(sorted(unknown))}; "
            "change a part of the grid that has such a workload."
        )
    if workload == cases.EMULATED:
        return partial(cases.EmulatedCase, panel, **settings)
    return partial(cases.RealCase, panel, **settings, workload=cases.named(specifications, "workloads", workload))


def _measured(case: cases.AnyCase, repeat: int, journal: Journal) -> Row:
    what = (
        f"{case.workload.name} {case.shape} {case.schedule} {case.condition.name} {case.method.name}, repeat {repeat}"
    )
    print(what, end=": ", flush=True)
    start = time.perf_counter()
    row = journal.measured(asdict(case), lambda: trainings.measure(case))
    print(f"{row['samples_per_s']:.1f} samples/s ({time.perf_counter() - start:.0f} s)", flush=True)
    return {
        "what": case.method.name,
        "panel": case.panel,
        "workload": case.workload.name,
        "shape": case.shape,
        "schedule": case.schedule,
        "heterogeneity": case.condition.name,
        "repeat": repeat,
        **row,
        "scale": case.scale,
        "seed": case.seed,
        "command": cases.command(case),
    }


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One row per part of the grid, condition and method: medians over the repeats, and ratios within them."""
    found = []
    for (panel, condition, method), group in _grouped(rows, "panel", "heterogeneity", "what").items():
        speeds = [row["samples_per_s"] for row in group]
        within = partial(quotients, [row for row in rows if row["panel"] == panel], "samples_per_s")
        found.append(
            {
                "what": f"{method}, median",
                **{name: group[0][name] for name in ("panel", "workload", "shape", "schedule", "heterogeneity")},
                "samples_per_s": statistics.median(speeds),
                "visible_samples_per_s": _median(
                    [row["visible_samples_per_s"] for row in group if row.get("visible_samples_per_s")]
                ),
                "low": min(speeds),
                "high": max(speeds),
                "over_all_reduce": _median(within((method, condition), ("all_reduce", condition))),
                "of_nosync": _median(within((method, condition), ("nosync", condition))),
                "slowdown": _median(within((method, "none"), (method, condition))),
                "of_bound": _median([row["samples_per_s"] / row["bound"] for row in group if row["bound"]]),
                "group_size": statistics.fmean(row["group_size"] for row in group),
                **{share: statistics.fmean(row[share] for row in group) for share in SHARES},
                "busiest": max(row["busy"] for row in group),
            }
        )
    return found


def ratios(rows: Sequence[Row]) -> Ratios:
    """Return those of :data:`GOALS` that were measured, for each emulated part of the grid."""
    found: Ratios = {}
    for group in _grouped(rows, "panel").values():
        first = group[0]
        suffix = "" if first["schedule"] == "1f1b" else f"/{first['schedule']}"
        for key, (ours, other, goal) in GOALS.items():
            _, shape, condition = key.split("/")
            values = quotients(group, "samples_per_s", (ours, condition), (other, condition))
            if values and first["workload"] == cases.EMULATED and first["shape"] == shape:
                meaning = f"samples/s, {shape} emulated, {first['schedule']}, {condition}: {ours} over {other}"
                found[key + suffix] = ratio(values, goal, meaning + _headroom(group, condition, ours, other))
    return found


def _headroom(rows: Sequence[Row], condition: str, ours: str, other: str) -> str:
    bounds = [r["bound"] / r["all_reduce_bound"] for r in rows if r["heterogeneity"] == condition and r["bound"]]
    if (ours, other) != (OURS, "all_reduce") or not bounds:
        return ""
    return f"; the drawn delays leave room for {statistics.median(bounds):.2f}"


def headline(summaries: Sequence[Row]) -> list[Row]:
    """The paper's largest figures beside those of this run: with the same schedule for all, and as in the paper with
    a flush for the baselines only."""
    speed = {
        (row["panel"], row["heterogeneity"], row["what"].removesuffix(", median")): row["samples_per_s"]
        for row in summaries
    }
    found = []
    for name, paper in {**HEADLINE, "none, slowdown": HEADLINE_SLOWDOWN}.items():
        row: Row = {"what": "headline, 4x4 under b", "over": name, "paper": paper}
        for column, panel in (("both_with_flush", "flush"), ("sdpipe_without_flush", "headline")):
            ours = (panel, "b", OURS)
            numerator, denominator = (
                ((panel, "none", OURS), ours) if "slowdown" in name else (ours, ("flush", "b", name))
            )
            if numerator in speed and denominator in speed:
                row[column] = speed[numerator] / speed[denominator]
        if len(row) == 5:
            found.append(row)
    return found


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _grouped(rows: Sequence[Row], *columns: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def possible(shapes: Sequence[tuple[int, int]], delay_ratios: Sequence[float], num_micro_batches: int) -> list[Row]:
    """Compute which delays and which schedule give the paper's headline figures: slowdowns against no delays, and the
    largest possible speed-ups over an all-reduce with a flush.

    With one draw per iteration, probability p, a delay of r mini-batches and M × N workers that flush, an iteration of
    all-reduce takes 1 + r(1 − (1 − p)^(MN)) mini-batches, and one of a pipeline that waits for no other takes
    1 + r(1 − (1 − p)^M). Two draws, one before each pass, count twice. Without a flush the stages of a pipeline are M
    mini-batches apart, so their delays overlap; a stage that never waits loses its own delays only, 1 + rp. The bubble
    of a flush, (m + M − 1)/m, comes on top. SDPipe runs without a flush in the paper, its baselines with one (§5.1).
    """
    rows = []
    for (stages, pipelines), draws, delay in product(shapes, ("iteration", "pass"), delay_ratios):
        bubble = (num_micro_batches + stages - 1) / num_micro_batches
        lost = delay if draws == "iteration" else 2 * delay
        by_all, one_pipeline, one_stage = (
            1.0 + length * (1.0 - (1.0 - PROBABILITY) ** workers)
            for workers, length in ((stages * pipelines, lost), (stages, lost), (1, lost * bubble))
        )
        rows.append(
            {
                "what": "by formula",
                "shape": f"{stages}x{pipelines}",
                "draws_per": draws,
                "delay_over_compute": float(delay),
                "all_reduce_slowdown": by_all,
                "pipeline_slowdown": one_pipeline,
                "stage_slowdown": one_stage,
                "speedup_flush": by_all / one_pipeline,
                "speedup_no_flush": by_all * bubble / one_stage,
            }
        )
    return rows
