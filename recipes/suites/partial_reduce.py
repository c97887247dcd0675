"""P-Reduce beside all-reduce, AD-PSGD, parameter servers and SDPipe at our scale, with the measures of its paper.

The parts ``virtual`` and ``scaling`` run in virtual time, with the real policies and plain SGD, and give the same on
every machine. ``emulated`` trains real processes that sleep instead of computing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hydra

from lightning_sdpipe import AllReduce
from lightning_sdpipe.policies import PolicyConfig
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.simulate import Work, jittered
from recipes.baselines import ParameterServer
from recipes.suites import throughput
from recipes.suites.grid import Goal, Ratios, Row, ratios, refuse_unknown, versus
from recipes.suites.trainings import seeded
from recipes.suites.virtual import Quadratic, by_decisions

LOWER_IS_BETTER = frozenset[str]()


def _goal(key: str, column: str, pair: str, value: float | None, meaning: str) -> tuple[str, Goal]:
    """Return the goal for the ratio of two methods, ``"above/below"`` in ``pair``, under the condition that ends the
    key."""
    condition, (above, below) = key.rpartition("/")[2], pair.split("/")
    return key, versus(f"{meaning}, {condition}", column, above, below, value, heterogeneity=condition)


_TIME = "virtual time to the target of {one} over that of {other}"
_RATE = "mini-batches that count per virtual second, {one} over {other}"
_SPEED = "samples/s, emulated, {one} over {other}"
VIRTUAL = dict(
    [
        _goal("dynamic/constant/one_x5", "seconds", "preduce/dynamic", 1.08, _TIME),
        *(_goal(f"preduce/{n}/one_x5", "seconds", f"{n}/dynamic", 1.2, _TIME) for n in ("eager", "asp", "hete")),
        _goal("preduce/backup3/hl3", "steps_per_s", "preduce/backup3", 1.1, _RATE),
        _goal("preduce/backup3/trace", "steps_per_s", "preduce/backup3", 1.4, _RATE),
    ]
)
_SPEEDS: dict[str, float | None] = {
    "preduce/all_reduce/one_x5": 3.3,
    "preduce/all_reduce/hl3": 1.35,
    "preduce/all_reduce/trace": 1.9,
    "preduce/all_reduce/none": None,
    "preduce/nosync/hl3": 0.85,
    **{f"sdpipe/preduce/{condition}": None for condition in ("one_x5", "hl3", "trace", "b")},
}
EMULATED = dict(_goal(key, "samples_per_s", key.rpartition("/")[0], goal, _SPEED) for key, goal in _SPEEDS.items())
SCALING = {
    "scaling/32/preduce_over_backup": versus(
        f"{_RATE} workers, 32 workers", "steps_per_s", "preduce", "backup", 1.3, pipelines=32
    )
}
BACKUP_SHARE = 4
"""In the scaling study (§5.3.2), one in this many workers is a backup."""


def run(
    *,
    virtual: Mapping[str, Any],
    scaling: Mapping[str, Any],
    emulated: Mapping[str, Any],
    only: Sequence[str],
    seed: int,
    **known: Mapping[str, Any],
) -> tuple[list[Row], Ratios]:
    """Run the parts that ``only`` names.

    Args:
        virtual: arguments of :func:`learning`, for the paper's Figure 7.
        scaling: arguments of :func:`scale`, for Figure 11.
        emulated: parameters of ``suite=throughput``.
        only: names of parts.
        seed: seed of the first repeat; later ones count up from it.
        known: specifications of ``methods`` and ``heterogeneity`` for Hydra, by name.
    """
    parts: Mapping[str, Callable[[], list[Row]]] = {
        "virtual": lambda: learning(known, **virtual, seed=seed),
        "scaling": lambda: scale(known, **scaling, seed=seed),
        "emulated": lambda: throughput.run(**emulated, seed=seed)[0],
    }
    refuse_unknown("a part of suite=partial_reduce", only, parts)
    measured = {name: parts[name]() for name in only}
    of = {name: measured.get(name, []) for name in parts}
    found = ratios(of["virtual"], VIRTUAL) | ratios(of["emulated"], EMULATED) | ratios(of["scaling"], SCALING)
    return [row for rows in measured.values() for row in rows], found


def learning(
    known: Mapping[str, Mapping[str, Any]],
    *,
    compared: Sequence[str],
    conditions: Sequence[str],
    learning_rate: float,
    target: float,
    num_pipelines: int,
    iterations: int,
    seconds: float,
    exchange: float,
    repeats: int,
    seed: int,
) -> list[Row]:
    """Train in virtual time.

    Args:
        known: specifications of ``methods`` and ``heterogeneity`` for Hydra, by name.
        compared: names of methods.
        conditions: names of heterogeneity.
        learning_rate: learning rate of SGD.
        target: a loss.
        num_pipelines: N, of one stage each.
        iterations: iterations of each pipeline, enough to reach the target before any pipeline has done them.
        seconds: seconds of a mini-batch on a device at full speed, with a jitter of a tenth.
        exchange: seconds of an exchange within a group, or with a server.
        repeats: number of repeats, whose seeds count up.
        seed: seed of the first repeat.

    Returns:
        A row for each training.
    """
    rows = []
    for repeat in range(repeats):
        number = seed + repeat
        for condition in conditions:
            work = _work(num_pipelines, iterations, seconds, exchange, known["heterogeneity"][condition], number)
            for name in compared:
                task = Quadratic(num_pipelines, learning_rate, number)
                points = by_decisions(_method(known["methods"][name]), work, task)
                reached, end = next((point for point in points if point.value <= target), None), points[-1]
                row: Row = {"what": name, "part": "virtual", "heterogeneity": condition, "pipelines": num_pipelines}
                row |= {column: reached and getattr(reached, column) for column in ("seconds", "updates", "steps")}
                row |= {"per_update_s": end.seconds / end.updates, "steps_per_s": end.steps / end.seconds}
                row |= {"repeat": repeat, "target": target, "loss": end.value, "seed": number}
                rows.append(row | {"curve": [list(point) for point in points]})
    return rows


def scale(
    known: Mapping[str, Mapping[str, Any]],
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
    """Return the mini-batches that count per virtual second, by the number of workers. See :func:`learning`.

    Args:
        workers: numbers of pipelines of one stage.
        condition: a name of heterogeneity.
        group_size: P.
    """
    rows, methods = [], known["methods"]
    for repeat in range(repeats):
        for count in workers:
            work = _work(count, iterations, seconds, exchange, known["heterogeneity"][condition], seed + repeat)
            sized: dict[str, Any] = {"all_reduce": methods["all_reduce"]}
            if count > 1:
                sized["backup"] = {**methods["backup3"], "quorum": count - count // BACKUP_SHARE}
                sized["preduce"] = {**methods["preduce"], "group_size": min(group_size, count)}
            for name, specification in sized.items():
                end = by_decisions(_method(specification), work, Quadratic(count, 0.1, seed + repeat))[-1]
                row = {"what": name, "part": "scaling", "heterogeneity": condition, "pipelines": count}
                rows.append({**row, "repeat": repeat, "steps_per_s": end.steps / end.seconds, "seed": seed + repeat})
    return rows


def _work(
    num_pipelines: int, iterations: int, seconds: float, exchange: float, slowness: Mapping[str, Any], seed: int
) -> Work:
    slow, vary = seeded(slowness, seed), jittered(seconds, 0.1, seed)
    return Work(1, num_pipelines, iterations, vary, heterogeneity=slow, exchange=lambda group: exchange)


def _method(specification: Mapping[str, Any]) -> PolicyConfig:
    method: PolicyConfig | AllReduce | ParameterServer = hydra.utils.instantiate(specification)
    if isinstance(method, AllReduce):
        return AllReduceModels()  # the same, for plain SGD
    return method.rule if isinstance(method, ParameterServer) else method
