"""Throughput of the synchronisation methods with stragglers: the grid of SDPipe §5.2 and §5.4, in one run.

In rows marked ``emulated``, workers sleep instead of computing; everything else about them is real.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast, get_args

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.simulate import Schedule, Work, simulate
from recipes.baselines.references import REFERENCES, only_delays, train_reference
from recipes.suites import machine
from recipes.suites.grid import Case, Grid, Ratios, Row, chosen, ratios, refuse_unknown, turns, values, versus
from recipes.suites.probe import Report, Used
from recipes.suites.trainings import EMULATED, Named, Training, calibrated_scale, named, quiet, train

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
"""By the ratio's key, without its schedule: the numerator's and the denominator's method, and the goal."""
SHARES = ("compute", "delays", "group_wait", "averaging", "pipeline_wait")
"""The parts of a worker's time."""


def run(
    *,
    grid: Mapping[str, Mapping[str, Any]],
    only: Sequence[str],
    scale: float | None,
    output: str | None,
    seed: int,
    **known: Mapping[str, Any],
) -> tuple[list[Row], Ratios]:
    """Run the parts of the grid that ``only`` names.

    Args:
        grid: the parts that :func:`plan` takes, by name.
        only: names of parts.
        scale: factor of emulated times and of all delays; None to measure it.
        output: file beside which finished rows are kept; None for nowhere.
        seed: seed of the first repeat; later ones count up from it.
        known: specifications for Hydra, by name, of ``methods``, ``heterogeneity``, and real ``workloads`` with their
            ``model`` and ``data``.

    Returns:
        A row for each training, and the ratios with goals.
    """
    quiet()
    measured = Grid(output)
    refuse_unknown("among suite.grid", only, grid)
    planned = [list(plan(panel, grid[panel], known, seed)) for panel in only]  # plan all before measuring any
    rows: list[Row] = []
    for cases in planned:
        factor = calibrated_scale(cases[0].asked, measured) if scale is None else scale
        scaled = [Case(case.columns, replace(case.asked, scale=factor)) for case in cases]
        rows += measured.run(scaled, measure, "samples_per_s")
    return rows, ratios_of(rows)


def plan(
    panel: str, part: Mapping[str, Any], specifications: Mapping[str, Mapping[str, Any]], seed: int
) -> Iterator[Case]:
    """Yield the cases of one part of the grid, in the order in which they run.

    Args:
        panel: name of the part.
        part: fields of a :class:`~recipes.suites.trainings.Training`, with ``micro_batch_seconds`` and
            ``num_parameters`` of a stage for emulated ones; ``iterations`` of each pipeline; lists of ``methods`` and
            ``heterogeneity``; the number of ``repeats``; and the conditions that are measured only ``once``.
        specifications: the suite's specifications.
        seed: seed of the first repeat.

    Raises:
        ConfigurationError: a method or condition is not among the specifications, an outside reference cannot have the
            condition, or a setting belongs to another workload.
    """
    settings = {name: part[name] for name in part.keys() - {"methods", "heterogeneity", "repeats", "once"}}
    workload = settings.pop("workload")
    settings["batches"] = settings.pop("iterations") * settings["num_pipelines"]
    if workload == EMULATED.name:
        settings["block_seconds"] = settings.pop("micro_batch_seconds")
        settings["block_parameters"] = settings.pop("num_parameters")
    else:
        settings["workload"] = named(specifications, "workloads", workload)
    if unknown := settings.keys() - {field.name for field in fields(Training)}:
        raise ConfigurationError(
            f"suite.grid.{panel} has workload={workload}, which does not go with {', '.join(sorted(unknown))}; "
            "change a part of the grid that has such a workload."
        )
    for repeat, condition, method in turns(
        part["repeats"], dict.fromkeys(part["heterogeneity"], part["methods"]), part["once"]
    ):
        case = Training(
            method=Named(method, {}) if method in REFERENCES else named(specifications, "methods", method),
            condition=named(specifications, "heterogeneity", condition),
            seed=seed + repeat,
            **settings,
        )
        if method in REFERENCES:
            only_delays(case, f"leave it out of suite.grid.{panel}.methods.")
        columns = {"what": method, "panel": panel, "workload": workload, "shape": case.shape, "schedule": case.schedule}
        yield Case({**columns, "heterogeneity": condition, "repeat": repeat, "seed": case.seed}, case)


def measure(case: Training) -> Row:
    """Train; return throughput, shares and bounds."""
    reports = train_reference(case) if case.method.name in REFERENCES else train(case)
    samples = case.num_micro_batches if case.workload is EMULATED else batch_size(case)
    row = {"scale": case.scale, **summary(reports, case.warm_up, samples)}
    for name, policy in (("bound", NoSync()), ("all_reduce_bound", AllReduceModels())):
        limit = bound(case, policy) if case.workload is EMULATED else None
        row[name] = limit and samples * limit
    return row


def batch_size(case: Training) -> int:
    """Return the number of samples in a real workload's mini-batch."""
    return int(case.workload.specification["data"]["batch_size"])


def bound(case: Training, policy: PolicyConfig) -> float | None:
    """Return the mini-batches per second of all pipelines that are possible for an emulated case with ``policy``, by a
    simulation in which only computation takes time; None for a schedule that is not simulated."""
    if case.schedule not in get_args(Schedule):
        return None
    assert isinstance(case.num_stages, int)
    m = 1 if case.schedule == "pipedream" else case.num_micro_batches
    seconds = case.num_micro_batches * case.block_seconds * case.scale
    schedule = cast(Schedule, case.schedule)
    work = Work(case.num_stages, case.num_pipelines, case.iterations, seconds, schedule, m, case.slowness)
    return sum(simulate(policy, work).rates(case.warm_up))


def summary(reports: Sequence[Report], warm_up: int, samples: int) -> Row:
    """Return throughput and shares of a training.

    Each pipeline is timed over its own iterations, so that all methods meet the same delays; samples_per_s is the sum
    of their rates. A user sees less, since an epoch ends when the last pipeline has trained its samples.

    Args:
        reports: reports of all workers.
        warm_up: number of each worker's first mini-batches that do not count.
        samples: number of samples in a pipeline's mini-batch.

    Returns:
        samples_per_s; group_size; the mean shares of the workers' time: compute, delays, group_wait, averaging,
        pipeline_wait (for other stages, including Lightning's work in between); busy, the share of the cores' time that
        these processes used; and each worker's shares.

    Raises:
        ValueError: pipelines trained different numbers of iterations, and so met different delays.
    """
    first = [report for report in reports if report.stage == 0]
    counts = [len(report.readings) for report in first]
    if len(set(counts)) > 1:
        raise ValueError(f"pipelines trained {min(counts)} and {max(counts)} iterations; use data='sharded'")
    used = {(report.stage, report.pipeline): report.used(warm_up) for report in reports}
    shares = {place: _shares(each) for place, each in used.items()}
    groups = sum(each.groups for each in used.values())
    processor = sum(each.processor for each in used.values())
    return {
        "samples_per_s": sum(samples * (counts[0] - warm_up) / report.used(warm_up).clock for report in first),
        "group_size": sum(each.members for each in used.values()) / groups if groups else 1.0,
        **{name: statistics.fmean(share[name] for share in shares.values()) for name in SHARES},
        "busy": processor / (machine.cores() * max(each.clock for each in used.values())),
        "workers": [{"stage": stage, "pipeline": pipeline, **share} for (stage, pipeline), share in shares.items()],
    }


def _shares(used: Used) -> dict[str, float]:
    parts = [part / used.clock for part in (used.computed, used.injected, used.waiting, used.averaging)]
    return dict(zip(SHARES, [*parts, max(0.0, 1.0 - sum(parts))], strict=True))


def ratios_of(rows: Sequence[Row]) -> Ratios:
    """Return the ratios of the :data:`GOALS` that were measured, for each schedule of the emulated parts."""
    found: Ratios = {}
    emulated = chosen(rows, workload=EMULATED.name)
    for schedule in values(emulated, "schedule"):
        goals = {}
        for key, (ours, other, value) in GOALS.items():
            _, shape, condition = key.split("/")
            common = {"shape": shape, "heterogeneity": condition, "schedule": schedule}
            meaning = f"samples/s, {shape} emulated, {schedule}, {condition}: {ours} over {other}"
            room = [row["bound"] / row["all_reduce_bound"] for row in chosen(emulated, **common) if row["bound"]]
            if room and (ours, other) == (OURS, "all_reduce"):
                meaning += f"; the drawn delays leave room for {statistics.median(room):.2f}"
            suffix = "" if schedule == "1f1b" else f"/{schedule}"
            goals[key + suffix] = versus(meaning, "samples_per_s", ours, other, value, **common)
        found |= ratios(emulated, goals, ("repeat", "panel"))
    return found
