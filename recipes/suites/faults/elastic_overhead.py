"""Cost of letting pipelines come and go when none does: an elastic run beside an ordinary one."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra

from lightning_sdpipe.sync import AllReduce
from recipes.suites.elastic import Work, World
from recipes.suites.grid import Goal, Ratios, Row, in_turn, ratios
from recipes.suites.trainings import Named, Training, quiet, train

LONGEST = 300.0
GOALS = {"elastic": 0.98, "allreduce": 0.97}


def measure(
    *,
    num_pipelines: int,
    batch_seconds: float,
    num_parameters: int,
    batches: int,
    warm_up: int,
    repeats: int,
    methods: Mapping[str, Any],
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Return the batches per second of both, run in rotated order; both deal batches if the method allows it.

    Args:
        batches: batches of each pipeline, in one epoch.
        warm_up: number of first updates, which do not count.
        repeats: repeats of each kind.
        methods: specifications for Hydra, by the name of their ratio.
    """
    quiet()
    rows: list[Row] = []
    goals = {}
    for name, method in methods.items():
        sync, count = hydra.utils.instantiate(method), batches * num_pipelines
        shared: dict[str, Any] = {"num_stages": 1, "num_pipelines": num_pipelines, "batches": count, "seed": seed}
        work = Work(sync=sync, batch_seconds=batch_seconds, num_parameters=num_parameters, **shared)
        ordinary = Training(
            method=Named(name, method),
            data="sharded" if isinstance(sync, AllReduce) else "dealt",
            block_seconds=batch_seconds,
            block_parameters=num_parameters,
            **shared,
        )
        for repeat, kind in in_turn(["elastic", "ordinary"], repeats):
            used = _elastic(work) if kind == "elastic" else _ordinary(ordinary)
            counted = [(own[warm_up], own[-1], len(own) - warm_up - 1) for own in used]
            row = {"method": name, "kind": kind, "repeat": repeat, "emulated": True}
            row["batches_per_s"] = sum(n / (last[0] - first[0]) for first, last, n in counted)
            each = [1e3 * (last[1] - first[1]) / n for first, last, n in counted]
            rows.append(row | {"processor_ms_per_batch": statistics.mean(each)})
            print(f"{name}: {kind}, repeat {repeat}: {row['batches_per_s']:.2f} batches per second", flush=True)
        meaning = f"samples per second of an elastic run without faults over an ordinary one, 1 × {num_pipelines}"
        above, below = ({"method": name, "kind": kind} for kind in ("elastic", "ordinary"))
        goals[f"overhead/{name}"] = Goal(meaning, "batches_per_s", above, below, GOALS[name])
    return rows, ratios(rows, goals)


Used = list[list[tuple[float, float]]]
"""By worker and update: the clock, and the processor seconds of all threads, which tell more on a busy machine."""


def _elastic(work: Work) -> Used:
    with tempfile.TemporaryDirectory() as directory, World(Path(directory), work) as it:
        records = it.finish(LONGEST)
        return [[(line["at"], line["processor"]) for line in record.said("update")] for record in records]


def _ordinary(case: Training) -> Used:
    return [[(reading.clock, reading.processor) for reading in report.readings] for report in train(case)]
