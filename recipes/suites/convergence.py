"""Time and samples to a target, with real compute on real data: SDPipe §5.3 and §5.5.

No worker is stopped to be evaluated: they write down their parameters as they go, and the model at each moment, the
mean over the pipelines, is evaluated after the run.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_sdpipe.optim import FrozenVariance
from recipes.harness.processes import run_processes
from recipes.suites.figures import curve_points, plot, require_matplotlib
from recipes.suites.grid import Case, Goal, Grid, Ratios, Row, chosen, quotients, ratio, refuse_unknown, turns, values
from recipes.suites.snapshots import Snapshots, evaluate
from recipes.suites.throughput import batch_size
from recipes.suites.trainings import Training, calibrated_scale, fit, make_trainer, named, quiet, strategy_of
from recipes.suites.virtual import in_one_process

LOWER_IS_BETTER = frozenset({"samples", "convergence"})

OURS, BASELINE = "sdpipe", "all_reduce"
WITHOUT_FLUSH, EIGHT_BIT = "sdpipe_without_flush", "sdpipe_eight_bit"
ASYNCHRONOUS, ASYNCHRONOUS_EIGHT_BIT = "adpsgd_async", "adpsgd_async_eight_bit"
SAMPLES: Sequence[tuple[str, str, str, float | None]] = (
    ("samples/{}/{}", OURS, BASELINE, 1.05),
    ("samples/{}/{}/without_flush", WITHOUT_FLUSH, BASELINE, 1.05),
    ("convergence/{}/{}", EIGHT_BIT, OURS, 1.05),
    (f"convergence/{ASYNCHRONOUS}/{{}}/{{}}", ASYNCHRONOUS_EIGHT_BIT, ASYNCHRONOUS, 1.05),
    *((f"{adam}/{{}}/{{}}", adam, BASELINE, None) for adam in ("one_bit_adam", "one_bit_adam_published")),
)
"""Of each workload and condition: a key, the method whose samples are divided by those of another, and the goal."""
TIME_GOAL, FINAL_GOAL = 1.4, -1.0
TARGET_FIELDS = ("metric", "target", "rising", "snapshot_every", "iterations")

Curve = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Learning:
    """A learning curve is determined by a training, and how it is looked at.

    Args:
        training: without warm-up.
        metric: that ``validation_step`` logs.
        every: so many iterations each worker writes down its part.
        points: of the curve.
        frozen: arguments of :class:`~lightning_sdpipe.optim.FrozenVariance`, if its optimizer has one.
        one_process: replicas are trained in turn, along decisions in virtual time.
    """

    training: Training
    metric: str
    every: int
    points: int
    frozen: Mapping[str, Any] | None = None
    one_process: bool = False


def run(
    *,
    experiments: Mapping[str, Mapping[str, Any]],
    only: Sequence[str],
    compared: Sequence[str],
    schedules: Mapping[str, str],
    exchanges: Mapping[str, Mapping[str, Any]],
    frozen: Mapping[str, Mapping[str, Any]],
    conditions: Sequence[str],
    repeats: int,
    points: int,
    scale: float | None,
    one_process: bool,
    output: str | None,
    seed: int,
    **known: Mapping[str, Any],
) -> tuple[list[Row], Ratios]:
    """Run the experiments that ``only`` names.

    Args:
        experiments: by the name of their workload, as :func:`learning` takes them.
        only: names of experiments.
        compared: names of methods.
        schedules: of those that do not have the experiment's.
        exchanges: specifications for Hydra, of those that do not send everything in full.
        frozen: arguments of :class:`~lightning_sdpipe.optim.FrozenVariance`, of those whose optimizer has one.
        conditions: names of heterogeneity.
        repeats: runs of each, with seeds that count up.
        points: of each learning curve.
        scale: of all delays; None for the length of a mini-batch without delays over the paper's.
        one_process: replicas are trained in turn, along decisions in virtual time.
        output: finished rows are kept beside this file, and figures are drawn there; None for neither.
        seed: of the first repeat.
        known: ``methods``, ``heterogeneity``, and the ``model`` and ``data`` of ``workloads``: specifications for
            Hydra, by name.
    """
    require_matplotlib(output)
    quiet()
    grid = Grid(output)
    there = {**known, "experiments": experiments}
    for kind, asked in (("experiments", only), ("methods", compared), ("heterogeneity", conditions)):
        refuse_unknown(f"among suite.{kind}", asked, there[kind])  # before anything is measured
    cases = []
    for name in only:
        factor = scale
        for repeat, condition, method in turns(repeats, dict.fromkeys(conditions, compared)):
            case = learning(known, name, experiments[name], method, condition, points, seed=seed + repeat)
            if one_process:
                case = replace(case, one_process=True)
            else:
                factor = calibrated_scale(case.training, grid) if factor is None else factor
                schedule, exchange = schedules.get(method, case.training.schedule), exchanges.get(method)
                training = replace(case.training, schedule=schedule, exchange=exchange, scale=factor)
                case = replace(case, training=training, frozen=frozen.get(method))
            columns = {"what": method, "heterogeneity": condition, "repeat": repeat, "scale": case.training.scale}
            cases.append(Case(columns, case))
    rows = learned(grid, cases, experiments)
    if output is not None:
        for axis, name in enumerate(("seconds", "samples")):
            drawn, panels = curve_points(rows, **{name: axis, "metric": 2}), ("workload", "heterogeneity")
            plot(drawn, Path(output), f"by_{name}", x=name, y=["metric"], panels=panels, each="repeat")
    return rows, ratios(rows)


def learning(
    known: Mapping[str, Mapping[str, Any]],
    name: str,
    experiment: Mapping[str, Any],
    method: str,
    condition: str,
    points: int,
    **fields: Any,
) -> Learning:
    """Return what an experiment asks for.

    Args:
        known: specifications of ``methods``, ``heterogeneity`` and ``workloads``.
        name: of its workload.
        experiment: the ``metric`` that ``validation_step`` logs, its ``target``, whether it is ``rising``, after how
            many iterations each snapshot is taken (``snapshot_every``), the ``iterations`` of each pipeline, and other
            fields of a :class:`~recipes.suites.trainings.Training`.
        method: a name.
        condition: likewise.
        points: of the curve.
        fields: of the training, that the experiment does not have.
    """
    fields |= {key: value for key, value in experiment.items() if key not in TARGET_FIELDS}
    training = Training(
        method=named(known, "methods", method),
        condition=named(known, "heterogeneity", condition),
        workload=named(known, "workloads", name),
        batches=experiment["iterations"] * fields["num_pipelines"],
        **fields,
    )
    return Learning(training, experiment["metric"], experiment["snapshot_every"], points)


def learned(grid: Grid, cases: Sequence[Case], experiments: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Measure learning curves; return rows with what they say of the targets of their experiments."""
    rows = []
    for row, (_, asked) in zip(grid.run(cases, measure, "final"), cases, strict=True):
        training, curve = asked.training, row["curve"]
        experiment = experiments[training.workload.name]
        target, rising = experiment["target"], experiment["rising"]
        seconds, samples = to_target(curve, target, rising) or (None, None)
        about = {
            "workload": training.workload.name,
            "schedule": training.schedule,
            "shape": training.shape,
            "target": f"{asked.metric} {'≥' if rising else '≤'} {target}",
            "seconds_to_target": seconds,
            "samples_to_target": samples,
            "rising": rising,
            "seconds": curve[-1][0],
            "samples": curve[-1][1],
            "seed": training.seed,
        }
        rows.append(about | row)
    return rows


def measure(asked: Learning) -> Row:
    """Return the ``curve`` of a training: seconds, samples of all pipelines, and the metric."""
    case, curve = asked.training, list[tuple[float, float, float]]()
    if asked.one_process:
        curve = in_one_process(case, asked.metric, asked.points)
    else:
        with tempfile.TemporaryDirectory() as directory:
            module, loaders = case.real()
            if asked.frozen is not None:
                configure, options = module.configure_optimizers, asked.frozen
                module.configure_optimizers = lambda: FrozenVariance(configure(), **options)  # type: ignore[method-assign, arg-type]
            snapshots = Snapshots(Path(directory), asked.every)
            trainer = make_trainer(strategy_of(case), case.workers, snapshots, limit_train_batches=case.iterations)
            fit(trainer, module, loaders)
            arguments = (Path(directory), case.workload.specification, asked.metric, batch_size(case), asked.points)
            (curve,) = run_processes(1, evaluate, *arguments)
    return {"final": curve[-1][2], "curve": [list(point) for point in curve]}


def to_target(curve: Curve, target: float, rising: bool) -> tuple[float, float] | None:
    """Return seconds and samples at which the curve first reaches ``target``, between its points in proportion; None if
    it does not."""
    sign = 1.0 if rising else -1.0
    before: Sequence[float] | None = None
    for point in curve:
        missing = sign * (target - point[2])
        if missing <= 0.0:
            if before is None:
                return point[0], point[1]
            share = 1.0 + missing / (sign * (point[2] - before[2]))  # from the last point to this one
            return before[0] + share * (point[0] - before[0]), before[1] + share * (point[1] - before[1])
        before = point
    return None


def ratios(rows: Sequence[Row]) -> Ratios:
    """Compare methods seed by seed. A run that never reaches the target needs infinitely long; seeds in which the one
    that it is compared with does not are left out."""
    found: Ratios = {}
    for workload in values(rows, "workload"):
        for condition in values(chosen(rows, workload=workload), "heterogeneity"):
            own = chosen(rows, workload=workload, heterogeneity=condition)
            where = f"to {own[0]['target']}, {workload} under {condition}"
            for key, ours, other, goal in SAMPLES:
                key = key.format(workload, condition)
                compared = Goal("", "samples_to_target", {"what": ours}, {"what": other})
                if samples := quotients(own, compared):
                    seeds = f"{where}, {len(samples)} seeds"
                    found[key] = ratio(samples, goal, f"samples {seeds}: {ours} over {other}")
                    if key.startswith("samples"):
                        times = quotients(own, compared._replace(column="seconds_to_target"))
                        meaning = f"speed-up {seeds}: time of {other} over that of {ours}"
                        found[f"time{key[7:]}"] = ratio([1 / time for time in times], TIME_GOAL, meaning)
                if key.startswith("samples"):
                    gap = _final_gap(chosen(own, what=ours), chosen(own, what=other))
                    if gap is not None:
                        meaning = f"final value, {workload} under {condition}: {ours} above {other}, in its deviations"
                        found[f"final{key[7:]}"] = ratio([gap], FINAL_GOAL, meaning)
    return found


def _final_gap(ours: Sequence[Row], base: Sequence[Row]) -> float | None:
    """Return how much better the mean of our final values is, in standard deviations of the baseline's."""
    if not ours or len(base) < 2:
        return None
    sign = 1.0 if base[0]["rising"] else -1.0
    gain = sign * (statistics.fmean(r["final"] for r in ours) - statistics.fmean(r["final"] for r in base))
    deviation = statistics.stdev(row["final"] for row in base)
    return gain / deviation if deviation else math.copysign(math.inf, gain) if gain else 0.0
