"""torchft beside this package: replicas do the same emulated work and average gradients, and one is killed.

This project does not depend on torchft. If it is not installed, this part is left out, and says how to install it.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

import hydra

from recipes.baselines.torchft_replica import run
from recipes.harness.pipelines import Record, spans, usual_and_longest
from recipes.suites.elastic import Fault, Work, World
from recipes.suites.grid import Goal, Ratios, Row, in_turn, ratios

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
    for repeat, library in in_turn(["torchft", "sdpipe"], repeats):
        records, killed = (run if library == "torchft" else _ours)(work, VICTIM, after, seconds)
        steps = spans([record for record in records if record.pipeline != VICTIM], "update")
        median, longest = usual_and_longest(steps, killed)
        rows.append({"library": library, "repeat": repeat, "median_s": median, "longest_s": longest})
        print(rows[-1], flush=True)
    goals = {
        key: Goal(f"{meaning}, ours over torchft's", column, {"library": "sdpipe"}, {"library": "torchft"}, value)
        for key, meaning, column, value in (
            ("torchft/longest_step", "survivors' longest step after a kill", "longest_s", 0.5),
            ("torchft/steady", "a median step without faults", "median_s", 1.0),
        )
    }
    return rows, ratios(rows, goals)


def _ours(work: Work, victim: int, after: int, seconds: float) -> tuple[list[Record], float]:
    with tempfile.TemporaryDirectory() as directory, World(Path(directory), work) as it:
        it.launch_all({victim: Fault("forward", after)})
        it.wait(lambda: not it.lives(victim), "the death of one")
        time.sleep(seconds)
        records = it.records()
    (dead,) = [record for record in records if record.pipeline == victim]
    return records, dead.times("strikes")[0]
