"""Accuracy at equal work, in virtual time: how much is learned from equally many samples, and how soon.

Gradients are real, and so are the decisions of policies and of the dealer; only the length of a mini-batch on each
device is assumed. All methods have the same seeds, for weights, the order of samples, and the devices' jitter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from lightning_sdpipe import AllReduce, DiLoCo, LocalSGD
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.outer_model import AVERAGE, Nesterov
from lightning_sdpipe.simulate import Work, jittered
from recipes.suites.courses import Step, dealt, in_step
from recipes.suites.figures import plot, require_matplotlib
from recipes.suites.grid import Case, Grid, Ratios, Row, chosen, refuse_unknown, turns, values
from recipes.suites.replicas import Replicas
from recipes.suites.trainings import named, quiet, seeded

LOWER_IS_BETTER = frozenset({"samples"})

OURS, BASELINE = "sdpipe", "all_reduce"
SAMPLES_GOAL, TIME_GOALS = 1.05, {"static": 1.5, "static4": 2.2}
TARGET_AT = 0.8
"""The target is the mean of all-reduce's runs after this share of the samples."""
T95 = (math.inf, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for a two-sided 95 % interval, by degrees of freedom."""
JITTER = 0.05
"""Share by which the length of a mini-batch varies."""
LOSS = "val_loss"
GROUP = ("part", "task", "heterogeneity", "rate")
"""Columns in which rows agree that are compared with each other."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """A training, and how it is evaluated.

    Args:
        method: specification of the method, for Hydra.
        heterogeneity: specification of the devices' heterogeneity, for Hydra.
        workload: specifications of the ``model`` and the ``data``, for Hydra.
        num_pipelines: number of pipelines, of one stage each.
        passes: passes over the data.
        seconds: seconds of a mini-batch on a device at full speed.
        exchange: seconds of an exchange in a group, whatever its size.
        variance_correction: whether Adam's variance is corrected, with methods that average models.
        metric: a metric that ``validation_step`` logs.
        points: number of points of the learning curve.
        seed: seed of all draws.
    """

    method: Mapping[str, Any]
    heterogeneity: Mapping[str, Any]
    workload: Mapping[str, Any]
    num_pipelines: int
    passes: int
    seconds: float
    exchange: float
    variance_correction: bool
    metric: str
    points: int
    seed: int

    def work(self, iterations: int) -> Work:
        """Return the work of an epoch with this number of iterations."""
        slow = seeded(self.heterogeneity, self.seed)
        length = jittered(self.seconds, JITTER, self.seed)
        return Work(1, self.num_pipelines, iterations, length, heterogeneity=slow, exchange=lambda group: self.exchange)


def run(
    *,
    parts: Mapping[str, Mapping[str, Any]],
    only: Sequence[str],
    tasks: Mapping[str, Mapping[str, Any]],
    learned: Sequence[str],
    pipelines: Mapping[str, int],
    fields: Mapping[str, Any],
    processes: int,
    output: str | None,
    seed: int,
    **known: Mapping[str, Any],
) -> tuple[list[Row], Ratios]:
    """Run the parts that ``only`` names.

    Args:
        parts: by name: the methods to be ``compared``, the ``conditions``, the multiples of the learning rate
            (``rates``), and the number of ``repeats``, whose seeds count up.
        only: names of parts.
        tasks: by name: ``model`` and ``data``, the ``metric``, ``variance_correction``, and the ``goal`` for the final
            difference. For a loss (``LOSS``), less is better and the difference is in per cent; for a share, more is
            better and it is in points.
        learned: names of tasks.
        pipelines: number of pipelines under each condition.
        fields: other fields of :class:`Learning`, the same for all.
        processes: number of processes that train at the same time.
        output: file beside which finished rows are kept and figures drawn; None for neither.
        seed: seed of the first repeat.
        known: specifications of ``methods`` and ``heterogeneity`` for Hydra, by name.
    """
    require_matplotlib(output)
    quiet()
    refuse_unknown("among suite.parts", only, parts)
    refuse_unknown("among suite.tasks", learned, tasks)
    grid, rows = Grid(output), list[Row]()
    for task in learned:
        for part in only:
            cases = [*_cases(part, parts[part], task, tasks[task], pipelines, fields, known, seed)]
            asked = [case.asked for case in cases]
            _measure_at_once(grid, list({repr(each): each for each in map(_without_time, asked)}.values()), processes)
            for case in cases:
                row = case.columns | grid.measured(_without_time(case.asked), measure)
                rows.append(row | {"curve": _in_time(case.asked, row)})
    for group in _groups(rows):
        note_targets(group, tasks[group[0]["task"]]["metric"] == LOSS)
    if output is not None:
        for task in learned:
            _draw(chosen(rows, task=task), Path(output), task, tasks[task]["metric"])
    return rows, ratios(rows, tasks)


def _cases(
    part: str,
    asked: Mapping[str, Any],
    task: str,
    about: Mapping[str, Any],
    pipelines: Mapping[str, int],
    fields: Mapping[str, Any],
    known: Mapping[str, Mapping[str, Any]],
    seed: int,
) -> Iterator[Case]:
    compared = dict.fromkeys(asked["conditions"], asked["compared"])
    for repeat, condition, method in turns(asked["repeats"], compared):
        for rate in asked["rates"]:
            model = {**about["model"], "lr": about["model"]["lr"] * rate}
            learning = Learning(
                method=named(known, "methods", method).specification,
                heterogeneity=named(known, "heterogeneity", condition).specification,
                workload={"model": model, "data": about["data"]},
                num_pipelines=pipelines[condition],
                variance_correction=about["variance_correction"],
                metric=about["metric"],
                seed=seed + repeat,
                **fields,
            )
            names = {"part": part, "task": task, "what": method, "heterogeneity": condition}
            yield Case({**names, "rate": rate, "repeat": repeat, "seed": learning.seed}, learning)


def _measure_at_once(grid: Grid, asked: Sequence[Learning], processes: int) -> None:
    """Measure the trainings that the grid does not have yet."""
    asked = [each for each in asked if not grid.has(each)]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        results = pool.map(measure, asked) if processes > 1 else map(measure, asked)
        for number, (each, row) in enumerate(zip(asked, results, strict=True)):
            grid.keep(each, row)
            print(f"{number + 1} of {len(asked)}: seed {each.seed}, {row['final']:.4f}", flush=True)


def _without_time(asked: Learning) -> Learning:
    """Return a training from which this one differs only in its times: with all-reduce, devices affect nothing else."""
    if asked.method["_target_"].rpartition(".")[2] != AllReduce.__name__:
        return asked
    return replace(asked, heterogeneity={"_target_": "lightning_sdpipe.heterogeneity.Delays"})


def _in_time(asked: Learning, row: Row) -> list[list[float]]:
    if asked == _without_time(asked):
        return row["curve"]  # type: ignore[no-any-return]
    ends = in_step(asked.work(row["iterations"]), asked.passes)
    return [
        [ends[round(samples * len(ends) / row["samples"]) - 1], samples, value] for _, samples, value in row["curve"]
    ]


def measure(asked: Learning) -> Row:
    """Return the ``curve`` of a training (seconds, samples of all pipelines, and the metric of their mean), its
    ``final`` value, and ``iterations``, the number of mini-batches in an equal share of an epoch."""
    torch.set_num_threads(1)
    method = seeded(asked.method, asked.seed)
    jointly, n = isinstance(method, AllReduce), asked.num_pipelines
    rounds = LocalSGD(method.every) if isinstance(method, DiLoCo) else None
    if rounds and method != DiLoCo(method.every, method.lr, method.momentum):
        raise ConfigurationError(f"{method} is not simulated here: only its every, lr and momentum are.")
    outer = Nesterov(method.lr, method.momentum) if rounds else AVERAGE
    replicas = Replicas(asked.workload, n, asked.passes, asked.seed, jointly, asked.variance_correction, outer)
    work, total = asked.work(replicas.iterations), asked.passes * replicas.iterations * n
    due, curve, trained = [total * (i + 1) // asked.points for i in range(asked.points)], list[list[float]](), 0

    def look(at: float) -> None:
        while due and trained >= due[0]:
            curve.append([at, trained * replicas.batch_size, replicas.value(asked.metric)])
            del due[0]

    if jointly or rounds:
        for update, end in enumerate(in_step(work, asked.passes, rounds)):
            epoch, number = divmod(update, replicas.iterations)
            if rounds is None:
                replicas.step_jointly(epoch, number)
            else:
                for pipeline in range(n):
                    replicas.step(Step(end, pipeline, epoch, number * n + pipeline, number))
                if (number + 1) % rounds.every == 0 or number + 1 == replicas.iterations:
                    replicas.move_base()
            trained += n
            look(end)
    else:
        for event in dealt(method, work, asked.passes):
            if isinstance(event, Step):
                look(event.at)
                replicas.step(event)
                trained += 1
            else:
                replicas.mean(event)
        look(event.at)
    seconds, samples, final = curve[-1]
    return {"iterations": replicas.iterations, "seconds": seconds, "samples": samples, "final": final, "curve": curve}


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows in groups that are compared with each other."""
    keys = dict.fromkeys(tuple(row[name] for name in GROUP) for row in rows)
    return [chosen(rows, **dict(zip(GROUP, key, strict=True))) for key in keys]


def note_targets(rows: Sequence[Row], falls: bool = False) -> None:
    """Add the time and the samples to the target to each row, if all-reduce was measured. ``falls`` says that a lower
    metric is better."""
    if base := chosen(rows, what=BASELINE):
        at = round(TARGET_AT * len(base[0]["curve"])) - 1
        target = statistics.fmean(row["curve"][at][2] for row in base)
        for row in rows:
            reached = to_target(row["curve"], target, falls) or (None, None)
            row["seconds"] = row["curve"][-1][0]
            row |= {"target": target, "seconds_to_target": reached[0], "samples_to_target": reached[1]}


def to_target(curve: Sequence[Sequence[float]], target: float, falls: bool = False) -> tuple[float, float] | None:
    """Return the seconds and samples at which the curve, which rises or ``falls``, first reaches ``target``,
    interpolated linearly; None if it never does."""
    before: Sequence[float] | None = None
    for point in curve:
        if point[2] <= target if falls else point[2] >= target:
            if before is None:
                return point[0], point[1]
            share = (target - before[2]) / (point[2] - before[2])
            return before[0] + share * (point[0] - before[0]), before[1] + share * (point[1] - before[1])
        before = point
    return None


def ratios(rows: Sequence[Row], tasks: Mapping[str, Mapping[str, Any]]) -> Ratios:
    """Compare methods with all-reduce, seed by seed; return means and 95 % intervals."""
    found: Ratios = {}
    for group in _groups(rows):
        about, first = tasks[group[0]["task"]], group[0]
        base = {row["repeat"]: row for row in chosen(group, what=BASELINE)}
        for method in values(group, "what"):
            own = [row for row in chosen(group, what=method) if row["repeat"] in base]
            pairs = [(row, base[row["repeat"]]) for row in own]
            if method == BASELINE or not pairs:
                continue
            plain = first["part"] == "headline" and method == OURS
            where = "" if first["part"] == "headline" else f"{first['part']}/"
            where += f"{first['task']}/{first['heterogeneity']}" + ("" if method == OURS else f"/{method}")
            where += "" if first["rate"] == 1 else f"/rate{first['rate']:g}"
            falls, finals = about["metric"] == LOSS, [b["final"] for _, b in pairs]
            unit, whole = ("per cent", statistics.fmean(finals)) if falls else ("points", 1.0)
            gaps = [100 * (b["final"] - a["final"] if falls else a["final"] - b["final"]) / whole for a, b in pairs]
            noise = 100 * statistics.stdev(finals) / whole if len(pairs) > 1 else math.nan
            meaning = f"final {about['metric']}, {unit} by which {method} is better than all-reduce (s = {noise:.2g})"
            found[f"final/{where}"] = interval(gaps, about["goal"] if plain else None, meaning)
            goals = {"samples": SAMPLES_GOAL, "time": TIME_GOALS.get(first["heterogeneity"]), "rate": None}
            quotients = _quotients(pairs)
            for name, meaning in (
                ("samples", f"samples to {first['target']:.4g}: {method} over all-reduce"),
                ("time", f"time to it: all-reduce over {method}"),
                ("rate", f"samples per second until then: {method} over all-reduce"),
            ):
                goal = goals[name] if plain else None
                found[f"{name}/{where}"] = interval(quotients[name], goal, meaning, geometric=True)
    return found


def _quotients(pairs: Sequence[tuple[Row, Row]]) -> dict[str, list[float]]:
    """Return the quotients of samples, time and rate. A run that never reaches the target needs infinitely many
    samples."""
    reached = [(a, b) for a, b in pairs if b["samples_to_target"] is not None]
    samples = [(a["samples_to_target"] or math.inf) / b["samples_to_target"] for a, b in reached]
    time = [b["seconds_to_target"] / (a["seconds_to_target"] or math.inf) for a, b in reached]
    rate = [one * other for one, other in zip(samples, time, strict=True) if other]
    return {"samples": samples, "time": time, "rate": rate}


def interval(found: Sequence[float], goal: float | None, meaning: str, geometric: bool = False) -> dict[str, Any]:
    """Return the mean of paired values (of their logarithms if ``geometric``) and its 95 % interval by Student's t. For
    a single value, or if one is infinite, return the median and the extremes. The meaning says which."""
    middle = statistics.median(found) if found else math.nan
    low, high, kind = min(found, default=middle), max(found, default=middle), "median and extremes"
    if len(found) > 1 and math.isfinite(high) and (low > 0.0 or not geometric):
        plain = [math.log(value) for value in found] if geometric else found
        free, kind = min(len(plain) - 1, len(T95) - 1), "interval of 95 %"
        half = T95[free] * statistics.stdev(plain) / math.sqrt(len(plain))
        ends = [statistics.fmean(plain) + side * half for side in (-1, 0, 1)]
        low, middle, high = map(math.exp, ends) if geometric else ends
    return {
        "value": middle,
        "low": low,
        "high": high,
        "goal": goal,
        "meaning": f"{meaning}; {len(found)} seeds, {kind}",
    }


def _draw(rows: Sequence[Row], output: Path, task: str, metric: str) -> None:
    """Draw the metric over virtual time, with each point of a curve at its mean time over the seeds."""
    points = []
    for group in _groups(rows):
        for method in values(group, "what"):
            own = chosen(group, what=method)
            for number in range(len(own[0]["curve"])):
                at = statistics.fmean(row["curve"][number][0] for row in own)
                points += [{**row, "virtual seconds": at, metric: row["curve"][number][2]} for row in own]
    panels = ("part", "heterogeneity") if len(values(rows, "part")) > 1 else ("heterogeneity",)
    plot(points, output, task, x="virtual seconds", y=[metric], panels=panels)
