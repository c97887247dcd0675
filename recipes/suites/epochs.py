"""Wall time of whole epochs with validation, as users see it: batches dealt by speed against equal shards.

Workers sleep instead of computing; everything else is real.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning_sdpipe.heterogeneity import Slowed, Static
from recipes.suites.grid import Case, Goal, Grid, Ratios, Row, ratios, refuse_unknown, turns, versus
from recipes.suites.trainings import Training, named, quiet, train

LOWER_IS_BETTER = frozenset[str]()

OURS, SHARDED, ALL_REDUCE = "sdpipe/dealt", "sdpipe/sharded", "all_reduce/sharded"
DEPTHS, RECTANGLE = "1+2+2", "2x2"
"""Pipelines on five devices, one of which is twice as fast: of different depths, and equal ones that leave it out."""
BY_SPEED = "all_reduce/by_speed"
BY_HAND = "/by_hand"


def _goal(key: str, ours: str, other: str, value: float) -> tuple[str, Goal]:
    _, shape, condition = key.split("/")
    meaning = f"s per epoch, {shape} emulated, {condition}: {{one}} over {{other}}"
    return key, versus(meaning, "epoch_s", other, ours, value, shape=shape, heterogeneity=condition)


GOALS = dict(
    [
        _goal("all_reduce/1x4/static", OURS, ALL_REDUCE, 1.6),
        _goal("all_reduce/1x4/static4", OURS, ALL_REDUCE, 2.4),
        _goal("all_reduce/4x4/b", OURS, ALL_REDUCE, 1.4),
        _goal("all_reduce/4x4/trace", OURS, ALL_REDUCE, 1.3),
        _goal("sharded/1x4/none", OURS, SHARDED, 0.98),
        _goal("batch_by_speed/1x4/static", BY_SPEED, ALL_REDUCE, 1.5),
        _goal("by_hand/1x4/static", OURS + BY_HAND, ALL_REDUCE + BY_HAND, 1.5),
    ]
)
for _shape, _condition, _value in (("1x4", "static", 0.93), (DEPTHS, "none", 0.85)):
    GOALS[f"bound/{_shape}/{_condition}"] = Goal(
        f"mini-batches/s of whole epochs, {_shape} emulated, {_condition}: {OURS} over the sum of the devices' own",
        "batches_per_s",
        {"what": OURS, "shape": _shape, "heterogeneity": _condition},
        "sum_of_rates",
        _value,
    )
GOALS[f"rectangle/{DEPTHS}/none"] = Goal(
    f"s per epoch, emulated, {OURS}: {RECTANGLE}, which leaves one of five unlike devices out, over {DEPTHS}",
    "epoch_s",
    {"what": OURS, "shape": RECTANGLE},
    {"what": OURS, "shape": DEPTHS},
    1.30,
)


def run(
    *,
    grid: Mapping[str, Mapping[str, Any]],
    only: Sequence[str],
    seed: int,
    **known: Mapping[str, Any],
) -> tuple[list[Row], Ratios]:
    """Run the parts of the grid that ``only`` names.

    Args:
        grid: the parts that :func:`plan` takes, by name.
        only: names of parts.
        seed: seed of the first repeat; later ones count up from it.
        known: specifications of ``methods`` and ``heterogeneity`` for Hydra, by name.

    Returns:
        A row for each training, and the ratios with goals.

    Raises:
        ConfigurationError: ``only`` names an unknown part.
    """
    refuse_unknown("a part of suite=epochs", only, grid)
    quiet()
    cases = [case for panel in only for case in plan(grid[panel], known, seed)]
    rows = Grid().run(cases, measure, "epoch_s")
    return rows, ratios(rows, GOALS, ("micro_batches", "repeat"))


def plan(part: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]], seed: int) -> Iterator[Case]:
    """Yield the trainings of one part of the grid, in the order in which they run.

    Args:
        part: fields of a :class:`~recipes.suites.trainings.Training`; for each of the ``conditions``, the trainings as
            method/data; and the number of ``repeats``.
        known: specifications for Hydra.
        seed: seed of the first repeat.
    """
    fields = {name: value for name, value in part.items() if name not in ("conditions", "repeats")}
    for repeat, condition, what in turns(part["repeats"], part["conditions"]):
        method, _, data = what.partition("/")
        case = Training(
            method=named(known, "methods", method),
            condition=named(known, "heterogeneity", condition),
            data=data,
            seed=seed + repeat,
            **fields,
        )
        columns = {"what": what + BY_HAND * case.by_hand, "shape": case.shape, "micro_batches": case.num_micro_batches}
        yield Case({**columns, "heterogeneity": condition, "repeat": repeat}, case)


def measure(case: Training) -> Row:
    """Return the mean length of all epochs except the first, in which everything starts and no speed is known yet. If
    the devices' speeds differ, also return the sum of the mini-batches per second that each would make alone."""
    times = train(case)[0].starts
    epoch = statistics.mean(after - before for before, after in pairwise(times[1:]))
    row = {"epoch_s": epoch, "batches_per_s": case.batches / epoch, "sum_of_rates": None, "emulated": True}
    match case.slowness:
        case Static(factors) | Slowed(_, tuple(factors)) if case.num_stages == 1 or case.pace is not None:
            count = case.num_pipelines if case.pace is None else case.workers
            speeds = [1 / factors[rank % len(factors)] for rank in range(count)]
            seconds = case.block_seconds * case.scale * (case.num_blocks or 1) * case.num_micro_batches
            row["sum_of_rates"] = sum(speeds) / seconds
    return row | {"seed": case.seed}
