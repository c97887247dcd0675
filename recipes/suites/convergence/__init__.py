"""Time and samples to a target, with real compute on real data: SDPipe §5.3 and §5.5.

No worker is stopped to be evaluated: they write down their parameters as they go, and the model at each moment, the
mean over the pipelines, is evaluated after the run.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_sdpipe.optim import FrozenVariance
from recipes.suites import cases, machine, trainings
from recipes.suites.calibration import calibrated_scale
from recipes.suites.cases import RealCase, named
from recipes.suites.convergence.one_process import learning_curve
from recipes.suites.convergence.snapshots import Snapshots, evaluate
from recipes.suites.figures import convergence_figures, require_matplotlib
from recipes.suites.journal import Journal
from recipes.suites.processes import run_processes
from recipes.suites.ratios import Ratio, Ratios, Row, ratio, refuse_unknown, rotated

LOWER_IS_BETTER = frozenset({"samples", "convergence"})

OURS, BASELINE = "sdpipe", "all_reduce"
WITHOUT_FLUSH, EIGHT_BIT = "sdpipe_without_flush", "sdpipe_eight_bit"
ASYNCHRONOUS, ASYNCHRONOUS_EIGHT_BIT = "adpsgd_async", "adpsgd_async_eight_bit"
ONE_BIT_ADAM = "one_bit_adam", "one_bit_adam_published"
SAMPLES_GOAL = 1.05
TIME_GOAL = 1.4
FINAL_GOAL = -1.0
TARGET_FIELDS = ("metric", "target", "rising", "snapshot_every")

Curve = Sequence[Sequence[float]]


def run(
    *,
    methods: Mapping[str, Any],
    heterogeneity: Mapping[str, Any],
    workloads: Mapping[str, Any],
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
) -> tuple[list[Row], Ratios]:
    """Run the experiments that ``only`` names.

    Args:
        methods: specifications for Hydra, by name.
        heterogeneity: likewise.
        workloads: the ``model`` and ``data`` of each, likewise.
        experiments: by the name of their workload, fields of a :class:`~recipes.suites.cases.RealCase`, with the
            ``metric`` that ``validation_step`` logs, its ``target``, whether it is ``rising``, and after how many
            iterations each snapshot is taken.
        only: names of experiments.
        compared: names of methods.
        schedules: of those that do not have the experiment's.
        exchanges: specifications for Hydra, of those that do not send everything in full.
        frozen: arguments of :class:`~lightning_sdpipe.optim.FrozenVariance`, of those whose optimizer has one.
        conditions: names of heterogeneity.
        repeats: runs of each, with seeds that count up.
        points: of each learning curve.
        scale: of all delays; None for the length of a mini-batch without delays over the paper's.
        one_process: replicas are trained in turn, along decisions in virtual time (``one_process.py``).
        output: finished rows are kept beside this file, and figures are drawn there; None for neither.
        seed: of the first repeat.
    """
    if output is not None:
        require_matplotlib()
    trainings.quiet()
    journal = Journal(None if output is None else Path(output).with_suffix(".rows.jsonl"), machine.setting())
    specifications = {"methods": methods, "heterogeneity": heterogeneity, "workloads": workloads}
    for kind, asked, known in (
        ("experiments", only, experiments),
        ("methods", compared, methods),
        ("heterogeneity", conditions, heterogeneity),
    ):
        refuse_unknown(f"among suite.{kind}", asked, known)  # before anything is measured
    rows: list[Row] = []
    for name in only:
        experiment = experiments[name]
        fields = {key: value for key, value in experiment.items() if key not in TARGET_FIELDS}
        factor = scale
        for repeat in range(repeats):
            for condition in conditions:
                for method in rotated(compared, repeat):
                    case = RealCase(
                        panel="convergence",
                        method=named(specifications, "methods", method),
                        condition=named(specifications, "heterogeneity", condition),
                        workload=named(specifications, "workloads", name),
                        warm_up=0,
                        scale=1.0,
                        seed=seed + repeat,
                        **fields,
                    )
                    if one_process:
                        rows.append(_measured(case, None, repeat, experiment, points, journal, in_turn=True))
                        continue
                    if factor is None:
                        factor = calibrated_scale(case, methods["all_reduce"], heterogeneity["none"], journal)
                    schedule, exchange = schedules.get(method, case.schedule), exchanges.get(method)
                    case = replace(case, schedule=schedule, exchange=exchange, scale=factor)
                    rows.append(_measured(case, frozen.get(method), repeat, experiment, points, journal))
    if output is not None:
        convergence_figures(rows, Path(output))
    return rows, ratios(rows)


def _measured(
    case: RealCase,
    frozen: Mapping[str, Any] | None,
    repeat: int,
    experiment: Mapping[str, Any],
    points: int,
    journal: Journal,
    in_turn: bool = False,
) -> Row:
    print(f"{case.workload.name} {case.condition.name} {case.method.name}, repeat {repeat}", end=": ", flush=True)
    metric, every = experiment["metric"], experiment["snapshot_every"]
    asked = ({"frozen": dict(frozen)} if frozen else {}) | ({"one_process": True} if in_turn else {})

    def learn() -> Row:
        if in_turn:
            return {"curve": learning_curve(case, metric, points)}
        return train(case, metric, every, points, frozen)

    return {
        "what": case.method.name,
        "schedule": case.schedule,
        "heterogeneity": case.condition.name,
        "repeat": repeat,
        **learned(case, experiment, {"points": points, **asked}, journal, learn),
        "scale": case.scale,
        "command": _command(case, frozen, experiment, points, in_turn),
    }


def learned(
    case: RealCase, experiment: Mapping[str, Any], asked: Mapping[str, Any], journal: Journal, learn: Callable[[], Row]
) -> Row:
    """Return what a training says of the target of its experiment, and print its last value.

    Args:
        case: what is trained.
        experiment: its metric and target, as :func:`run` takes them.
        asked: what else determines the curve.
        journal: of finished measurements.
        learn: returns the ``curve``.
    """
    start = time.perf_counter()
    metric, target, rising = experiment["metric"], experiment["target"], experiment["rising"]
    every = experiment["snapshot_every"]
    curve = journal.measured({**asdict(case), "metric": metric, "snapshot_every": every, **asked}, learn)["curve"]
    seconds, samples = to_target(curve, target, rising) or (None, None)
    print(f"{metric} {curve[-1][2]:.3f} ({time.perf_counter() - start:.0f} s)", flush=True)
    return {
        "workload": case.workload.name,
        "shape": case.shape,
        "target": f"{metric} {'≥' if rising else '≤'} {target}",
        "seconds_to_target": seconds,
        "samples_to_target": samples,
        "rising": rising,
        "seconds": curve[-1][0],
        "samples": curve[-1][1],
        "final": curve[-1][2],
        "seed": case.seed,
        "curve": curve,
    }


def train(
    case: RealCase, metric: str, every: int, points: int, frozen: Mapping[str, Any] | None = None
) -> dict[str, list[list[float]]]:
    """Return the ``curve`` of a training: seconds, samples of all pipelines, and the metric.

    Args:
        case: what is trained.
        metric: that ``validation_step`` logs.
        every: so many iterations each worker writes down its part.
        points: of the curve.
        frozen: arguments of :class:`~lightning_sdpipe.optim.FrozenVariance`, if its optimizer has one.
    """
    with tempfile.TemporaryDirectory() as directory:
        module, loader = trainings.real_training(case)
        if frozen is not None:
            configure = module.configure_optimizers
            module.configure_optimizers = lambda: FrozenVariance(configure(), **frozen)  # type: ignore[method-assign, arg-type]
        snapshots = Snapshots(Path(directory), every)
        strategy, iterations = trainings.strategy(case), case.iterations
        trainings.fit(module, [loader], strategy, case.workers, snapshots, limit_train_batches=iterations)
        arguments = (Path(directory), case.workload.specification, metric, loader.batch_size, points)
        (curve,) = run_processes(1, evaluate, *arguments)
    return {"curve": [list(point) for point in curve]}


def _command(
    case: RealCase, frozen: Mapping[str, Any] | None, experiment: Mapping[str, Any], points: int, in_turn: bool
) -> str:
    settings = {
        "scale": case.scale,
        "only": [case.workload.name],
        "compared": [case.method.name],
        "conditions": [case.condition.name],
        "repeats": 1,
        "points": points,
        **({"one_process": True} if in_turn else {}),
        f"experiments.{case.workload.name}": experiment,
        **cases.specifications(case),
        **({f"exchanges.{case.method.name}": case.exchange} if case.exchange else {}),
        **({f"frozen.{case.method.name}": frozen} if frozen else {}),
    }
    return cases.suite_command("convergence", case.seed, settings)


def to_target(curve: Curve, target: float, rising: bool) -> tuple[float, float] | None:
    """Seconds and samples at which the curve first reaches ``target``, between its points in proportion; None if it
    does not."""
    sign = 1.0 if rising else -1.0
    before: Sequence[float] | None = None
    for point in curve:
        missing = sign * (target - point[2])
        if missing <= 0.0:
            if before is None:
                return point[0], point[1]
            gained = sign * (point[2] - before[2])
            share = 1.0 + missing / gained  # from the last point to this one
            return before[0] + share * (point[0] - before[0]), before[1] + share * (point[1] - before[1])
        before = point
    return None


def ratios(rows: Sequence[Row]) -> Ratios:
    """Ours against all-reduce, seed by seed, with a flush and without. A run that never reaches the target needs
    infinitely long; seeds in which all-reduce does not are left out."""
    found: Ratios = {}
    for workload, condition in dict.fromkeys((row["workload"], row["heterogeneity"]) for row in rows):
        own = [row for row in rows if (row["workload"], row["heterogeneity"]) == (workload, condition)]
        for ours, key in ((OURS, ""), (WITHOUT_FLUSH, "/without_flush")):
            found |= _compared(own, ours, workload, condition, key)
        if pairs := _pairs(own, EIGHT_BIT, OURS):
            found[f"convergence/{workload}/{condition}"] = _samples(pairs, EIGHT_BIT, OURS)
        if pairs := _pairs(own, ASYNCHRONOUS_EIGHT_BIT, ASYNCHRONOUS):
            key = f"convergence/{ASYNCHRONOUS}/{workload}/{condition}"
            found[key] = _samples(pairs, ASYNCHRONOUS_EIGHT_BIT, ASYNCHRONOUS)
        for ours in ONE_BIT_ADAM:
            if pairs := _pairs(own, ours, BASELINE):
                found[f"{ours}/{workload}/{condition}"] = _samples(pairs, ours, BASELINE, goal=None)
    return found


def _pairs(own: Sequence[Row], method: str, base: str) -> list[tuple[Row, Row]]:
    """Run of two methods with the same seed, in which the second reaches the target."""
    of_base = {row["repeat"]: row for row in own if row["what"] == base and row["samples_to_target"] is not None}
    return [(row, of_base[row["repeat"]]) for row in own if row["what"] == method and row["repeat"] in of_base]


def _samples(pairs: Sequence[tuple[Row, Row]], method: str, base: str, goal: float | None = SAMPLES_GOAL) -> Ratio:
    values = [_or_never(one["samples_to_target"]) / other["samples_to_target"] for one, other in pairs]
    return ratio(values, goal, f"samples {_target(pairs)}: {method} over {base}")


def _target(pairs: Sequence[tuple[Row, Row]]) -> str:
    row = pairs[0][0]
    return f"to {row['target']}, {row['workload']} under {row['heterogeneity']}, {len(pairs)} seeds"


def _compared(own: Sequence[Row], method: str, workload: str, condition: str, key: str) -> Ratios:
    """``method`` against all-reduce; ``key`` is what the names of the ratios end with."""
    found: Ratios = {}
    if pairs := _pairs(own, method, BASELINE):
        found[f"samples/{workload}/{condition}{key}"] = _samples(pairs, method, BASELINE)
        seconds = [base["seconds_to_target"] / _or_never(ours["seconds_to_target"]) for ours, base in pairs]
        meaning = f"speed-up {_target(pairs)}: time of {BASELINE} over that of {method}"
        found[f"time/{workload}/{condition}{key}"] = ratio(seconds, TIME_GOAL, meaning)
    all_ours, all_base = ([row for row in own if row["what"] == name] for name in (method, BASELINE))
    gap = _final_gap(all_ours, all_base)
    if gap is not None:
        found[f"final/{workload}/{condition}{key}"] = ratio(
            [gap],
            FINAL_GOAL,
            f"final value, {workload} under {condition}: {method} above {BASELINE}, in its deviations",
        )
    return found


def _or_never(value: float | None) -> float:
    return math.inf if value is None else value


def _final_gap(ours: Sequence[Row], base: Sequence[Row]) -> float | None:
    """Return how much better the mean of our final values is, in standard deviations of the baseline's."""
    if not ours or len(base) < 2:
        return None
    sign = 1.0 if base[0]["rising"] else -1.0
    gain = sign * (statistics.fmean(r["final"] for r in ours) - statistics.fmean(r["final"] for r in base))
    deviation = statistics.stdev(row["final"] for row in base)
    return gain / deviation if deviation else math.copysign(math.inf, gain) if gain else 0.0
