"""P-Reduce beside all-reduce, AD-PSGD, parameter servers and SDPipe: its paper's table and figures, at our scale.

The parts ``virtual``, ``sweep``, ``production`` and ``scaling`` are computed in virtual time, with the real policies
and plain SGD: the same on every machine. ``emulated`` trains real processes that sleep instead of computing, and
``training`` trains real models.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra

from lightning_sdpipe import AllReduce
from lightning_sdpipe.heterogeneity import Heterogeneity
from lightning_sdpipe.policies import PolicyConfig
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.simulate import Work, jittered
from recipes.baselines import ParameterServer
from recipes.suites import convergence, throughput
from recipes.suites.cases import seeded
from recipes.suites.figures import require_matplotlib
from recipes.suites.partial_reduce import figures
from recipes.suites.partial_reduce.virtual import Digits, Problem, Quadratic, at_target, train
from recipes.suites.ratios import Ratios, Row, quotients, ratio, refuse_unknown

LOWER_IS_BETTER = frozenset({"samples"})

PAPERS_TABLE_1: Mapping[str, Mapping[str, tuple[float | None, float | None, float]]] = {
    "none": {
        "all_reduce": (530, 1226, 0.432),
        "eager": (None, None, 0.217),
        "adpsgd": (482, 6342, 0.076),
        "bsp": (605, 1275, 0.475),
        "asp": (768, 10213, 0.075),
        "hete": (756, 9935, 0.076),
        "backup3": (588, 1482, 0.397),
        "preduce": (423, 3030, 0.140),
        "dynamic": (393, 2706, 0.145),
        "preduce5": (448, 1500, 0.299),
        "dynamic5": (456, 1484, 0.307),
    },
    "hl3": {
        "all_reduce": (1150, 1425, 0.807),
        "eager": (None, None, 0.349),
        "adpsgd": (731, 7029, 0.104),
        "bsp": (1204, 1438, 0.837),
        "asp": (996, 10335, 0.096),
        "hete": (861, 8789, 0.098),
        "backup3": (734, 1556, 0.472),
        "preduce": (630, 3209, 0.196),
        "dynamic": (603, 3017, 0.200),
        "preduce5": (639, 1607, 0.398),
        "dynamic5": (658, 1621, 0.406),
    },
}
"""ResNet-34 on CIFAR-10, 8 V100: run time in seconds, updates, seconds of an update. Eager-Reduce never converged."""

TIME_GOALS = {
    "dynamic/constant/one_x5": ("dynamic", "preduce", 1.08),
    "preduce/eager/one_x5": ("dynamic", "eager", 1.2),
    "preduce/asp/one_x5": ("dynamic", "asp", 1.2),
    "preduce/hete/one_x5": ("dynamic", "hete", 1.2),
}
"""Time to the target of the second over that of the first, in virtual time."""

RATE_GOALS = {"preduce/backup3/hl3": 1.1, "preduce/backup3/trace": 1.4}
"""Mini-batches that count per second, in virtual time."""

SPEED_GOALS: Mapping[str, tuple[str, str, float | None]] = {
    "preduce/all_reduce/one_x5": ("preduce", "all_reduce", 3.3),
    "preduce/all_reduce/hl3": ("preduce", "all_reduce", 1.35),
    "preduce/all_reduce/trace": ("preduce", "all_reduce", 1.9),
    "preduce/all_reduce/none": ("preduce", "all_reduce", None),
    "preduce/nosync/hl3": ("preduce", "nosync", 0.85),
    "sdpipe/preduce/one_x5": ("sdpipe", "preduce", None),
    "sdpipe/preduce/hl3": ("sdpipe", "preduce", None),
    "sdpipe/preduce/trace": ("sdpipe", "preduce", None),
    "sdpipe/preduce/b": ("sdpipe", "preduce", None),
}
"""Samples per second of emulated workers; None where there is nothing to reach."""

SCALING_GOAL = 1.3
SAMPLES_GOAL = 1.15
BACKUP_SHARE = 4
"""One of so many workers is a backup in the scaling study (§5.3.2)."""


def run(
    *,
    methods: Mapping[str, Any],
    heterogeneity: Mapping[str, Any],
    virtual: Mapping[str, Any],
    sweep: Mapping[str, Any],
    production: Mapping[str, Any],
    scaling: Mapping[str, Any],
    emulated: Mapping[str, Any],
    training: Mapping[str, Any],
    only: Sequence[str],
    output: str | None,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Run the parts that ``only`` names.

    Args:
        methods: specifications for Hydra, by name.
        heterogeneity: likewise.
        virtual: arguments of :func:`learning`, for the paper's Table 1 and Figure 7.
        sweep: likewise, with methods that differ in P, for Figure 8.
        production: likewise, for Figure 9.
        scaling: arguments of :func:`scale`, for Figure 11.
        emulated: parameters of ``suite=throughput``.
        training: parameters of ``suite=convergence``.
        only: names of parts.
        output: finished rows are kept beside this file, and figures are drawn there; None for neither.
        seed: of the first repeat; the following ones count up from it.
    """
    if output is not None:
        require_matplotlib()
    parts: Mapping[str, Callable[[], list[Row]]] = {
        "virtual": lambda: learning(methods, heterogeneity, **virtual, seed=seed, what="virtual"),
        "sweep": lambda: learning(methods, heterogeneity, **sweep, seed=seed, what="sweep"),
        "production": lambda: learning(methods, heterogeneity, **production, seed=seed, what="production"),
        "scaling": lambda: scale(methods, heterogeneity, **scaling, seed=seed),
        "emulated": lambda: [row for row in throughput.run(**emulated, seed=seed)[0] if "repeat" in row],
        "training": lambda: convergence.run(**training, seed=seed)[0],
    }
    refuse_unknown("a part of suite=partial_reduce", only, parts)
    measured = {name: parts[name]() for name in only}
    if output is not None:
        figures.draw(measured, Path(output))
    found = ratios(measured)
    return [row for rows in measured.values() for row in rows] + table_1(measured.get("virtual", [])), found


def learning(
    methods: Mapping[str, Any],
    heterogeneity: Mapping[str, Any],
    *,
    compared: Sequence[str],
    conditions: Sequence[str],
    problem: str,
    learning_rate: float,
    target: float,
    num_pipelines: int,
    iterations: int,
    seconds: float,
    exchange: float,
    repeats: int,
    seed: int,
    what: str,
) -> list[Row]:
    """Trainings in virtual time.

    Args:
        methods: specifications for Hydra, by name.
        heterogeneity: likewise.
        compared: names of methods.
        conditions: names of heterogeneity.
        problem: ``"quadratic"`` or ``"digits"``.
        learning_rate: of SGD.
        target: a loss.
        num_pipelines: N, of one stage each.
        iterations: of each pipeline; too few if the target is not reached before one pipeline has done them.
        seconds: of a mini-batch on a device at full speed, with a jitter of a tenth.
        exchange: seconds of an exchange among a group, or with a server.
        repeats: with seeds that count up.
        seed: of the first.
        what: the name of the part.

    Returns:
        One row for each training.
    """
    task: Problem = Digits(num_pipelines) if problem == "digits" else Quadratic()
    rows = []
    for repeat in range(repeats):
        for condition in conditions:
            work = _work(num_pipelines, iterations, seconds, exchange, heterogeneity[condition], seed + repeat)
            for name in compared:
                points = train(_method(methods[name]), work, task, learning_rate, seed + repeat)
                reached = at_target(points, target)
                end = points[-1]
                rows.append(
                    {
                        "what": what,
                        "method": name,
                        "problem": problem,
                        "heterogeneity": condition,
                        "pipelines": num_pipelines,
                        "repeat": repeat,
                        "target": target,
                        "seconds": None if reached is None else reached.seconds,
                        "updates": None if reached is None else reached.updates,
                        "steps": None if reached is None else reached.steps,
                        "per_update_s": end.seconds / end.updates,
                        "steps_per_s": end.steps / end.seconds,
                        "loss": end.loss,
                        "seed": seed + repeat,
                        "curve": [list(point) for point in points],
                    }
                )
    return rows


def scale(
    methods: Mapping[str, Any],
    heterogeneity: Mapping[str, Any],
    *,
    workers: Sequence[int],
    condition: str,
    group_size: int,
    iterations: int,
    seconds: float,
    exchange: float,
    repeats: int,
    seed: int,
) -> list[Row]:
    """Mini-batches that count per second, in virtual time, by the number of workers. See :func:`learning`.

    Args:
        workers: numbers of pipelines of one stage.
        condition: a name of heterogeneity.
        group_size: P.
    """
    task, rows = Quadratic(), []
    for repeat in range(repeats):
        for count in workers:
            work = _work(count, iterations, seconds, exchange, heterogeneity[condition], seed + repeat)
            sized: dict[str, Any] = {"all_reduce": methods["all_reduce"]}
            if count > 1:
                sized["backup"] = {**methods["backup3"], "quorum": count - count // BACKUP_SHARE}
                sized["preduce"] = {**methods["preduce"], "group_size": min(group_size, count)}
            for name, specification in sized.items():
                end = train(_method(specification), work, task, 0.1, seed + repeat)[-1]
                rows.append(
                    {
                        "what": "scaling",
                        "method": name,
                        "heterogeneity": condition,
                        "pipelines": count,
                        "repeat": repeat,
                        "steps_per_s": end.steps / end.seconds,
                        "seed": seed + repeat,
                    }
                )
    return rows


def _work(
    num_pipelines: int, iterations: int, seconds: float, exchange: float, slowness: Mapping[str, Any], seed: int
) -> Work:
    slow: Heterogeneity = seeded(slowness, seed)
    return Work(
        1, num_pipelines, iterations, jittered(seconds, 0.1, seed), heterogeneity=slow, exchange=lambda group: exchange
    )


def _method(specification: Mapping[str, Any]) -> PolicyConfig:
    method: PolicyConfig | AllReduce | ParameterServer = hydra.utils.instantiate(specification)
    if isinstance(method, AllReduce):
        return AllReduceModels()  # the same, for plain SGD
    return method.rule if isinstance(method, ParameterServer) else method


def table_1(rows: Sequence[Row]) -> list[Row]:
    """The paper's Table 1 beside ours, each over its all-reduce: methods, medians over the repeats."""
    found = []
    for condition in dict.fromkeys(row["heterogeneity"] for row in rows):
        medians = {
            name: {column: _median(rows, name, condition, column) for column in ("seconds", "updates", "per_update_s")}
            for name in dict.fromkeys(row["method"] for row in rows)
        }
        paper, base = PAPERS_TABLE_1.get(condition, {}), medians.get("all_reduce", {}).get("seconds")
        for name, ours in medians.items():
            theirs = paper.get(name, (None, None, None))
            found.append(
                {
                    "what": "table 1",
                    "method": name,
                    "heterogeneity": condition,
                    **ours,
                    "over_all_reduce": base and base / ours["seconds"],
                    "paper_seconds": theirs[0],
                    "paper_updates": theirs[1],
                    "paper_per_update_s": theirs[2],
                    "paper_over_all_reduce": theirs[0] and (paper["all_reduce"][0] or 0.0) / theirs[0],
                }
            )
    return found


def _median(rows: Sequence[Row], method: str, condition: str, column: str) -> float:
    """Return the median of a column; a training that never reaches the target needs infinitely long."""
    own = [row[column] for row in rows if (row["method"], row["heterogeneity"]) == (method, condition)]
    return statistics.median(math.inf if value is None else value for value in own)


def ratios(measured: Mapping[str, Sequence[Row]]) -> Ratios:
    """Return the ratios of the parts that were measured, repeat by repeat."""
    found: Ratios = {}

    def add(
        key: str, rows: Sequence[Row], by: tuple[str, str], of: tuple[str, str, str], goal: float | None, meaning: str
    ) -> None:
        """Divide a column ``by`` a name, ``of`` a condition and two methods, where there is something to divide."""
        (name, column), (condition, above, below) = by, of
        if values := quotients(rows, column, (above, condition), (below, condition), (name, "heterogeneity")):
            found[key] = ratio(values, goal, meaning)

    learned = measured.get("virtual", [])
    for key, (ours, other, goal) in TIME_GOALS.items():
        condition = key.rpartition("/")[2]
        meaning = f"virtual time to the target, {condition}: that of {other} over {ours}"
        add(key, learned, ("method", "seconds"), (condition, other, ours), goal, meaning)
    for key, goal in RATE_GOALS.items():
        ours, other, condition = key.split("/")
        meaning = f"mini-batches that count per virtual second, {condition}: {ours}, {other}"
        add(key, learned, ("method", "steps_per_s"), (condition, ours, other), goal, meaning)
    for key, (ours, other, speed_goal) in SPEED_GOALS.items():
        condition = key.rpartition("/")[2]
        meaning = f"samples/s, emulated, {condition}: {ours} over {other}"
        emulated = measured.get("emulated", [])
        add(key, emulated, ("what", "samples_per_s"), (condition, ours, other), speed_goal, meaning)
    scaled = [row for row in measured.get("scaling", []) if row["pipelines"] == 32]
    for condition in dict.fromkeys(row["heterogeneity"] for row in scaled):
        meaning = f"mini-batches that count per virtual second, 32 workers, {condition}: preduce over backup workers"
        of = (condition, "preduce", "backup")
        add("scaling/32/preduce_over_backup", scaled, ("method", "steps_per_s"), of, SCALING_GOAL, meaning)
    for workload in dict.fromkeys(row["workload"] for row in measured.get("training", [])):
        own = [row for row in measured["training"] if row["workload"] == workload]
        for condition in dict.fromkeys(row["heterogeneity"] for row in own):
            meaning = f"samples to {own[0]['target']}, {condition}: preduce over all_reduce"
            of = (condition, "preduce", "all_reduce")
            add(f"samples/{workload}/{condition}", own, ("what", "samples_to_target"), of, SAMPLES_GOAL, meaning)
    return found
