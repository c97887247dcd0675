"""torchft beside this package: replicas do the same emulated work and average gradients, and one is killed.

This project does not depend on torchft. If it is not installed, this part is left out, and says how to install it.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra

from recipes.baselines.torchft_replica import run
from recipes.harness.pipelines import Record
from recipes.suites.elastic import Fault, Work, World
from recipes.suites.grid import Goal, Ratios, Row, ratios, rotated

VICTIM = 2
INSTALL = "pip install torchft==0.2.0"


def measure(
    *,
    num_pipelines: int,
    batch_seconds: float,
    num_parameters: int,
    after: int,
    seconds: float,
    repeats: int,
    method: Any,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Return the survivors' longest step and their median step with both libraries, each replica in a Trainer.

    Args:
        after: updates until the victim is killed.
        seconds: seconds after that which are measured.
        repeats: repeats of each.
    """
    if importlib.util.find_spec("torchft") is None:
        print(f"torchft is not installed, and the comparison with it is left out; for it: {INSTALL}", flush=True)
        return [], {}
    rows: list[Row] = []
    sync = hydra.utils.instantiate(method)
    work = Work(
        *(1, num_pipelines, sync, 5000 * num_pipelines),
        batch_seconds=batch_seconds,
        num_parameters=num_parameters,
        seed=seed,
    )
    for repeat in range(repeats):
        for library in rotated(["torchft", "sdpipe"], repeat):
            records, killed = (run if library == "torchft" else _ours)(work, VICTIM, after, seconds)
            figures = _figures([record for record in records if record.pipeline != VICTIM], killed)
            print(f"{library}: {figures}", flush=True)
            rows.append({"library": library, "repeat": repeat} | figures)
    goals = {
        key: Goal(f"{meaning}, ours over torchft's", column, {"library": "sdpipe"}, {"library": "torchft"}, value)
        for key, meaning, column, value in (
            ("torchft/longest_step", "survivors' longest step after a kill", "longest_s", 0.5),
            ("torchft/steady", "a median step without faults", "median_s", 1.0),
        )
    }
    return rows, ratios(rows, goals)


def _figures(survivors: Sequence[Record], killed: float) -> dict[str, float]:
    steps = [step for record in survivors for step in pairwise(record.times("update"))]
    return {
        "median_s": statistics.median(end - begin for begin, end in steps if end <= killed),
        "longest_s": max(end - begin for begin, end in steps if end > killed),
    }


def _ours(work: Work, victim: int, after: int, seconds: float) -> tuple[list[Record], float]:
    with tempfile.TemporaryDirectory() as directory, World(Path(directory), work) as it:
        it.launch_all({victim: Fault("forward", after)})
        it.wait(lambda: not it.lives(victim), "the death of one")
        time.sleep(seconds)
        records = it.records()
    (dead,) = [record for record in records if record.pipeline == victim]
    return records, dead.times("strikes")[0]
