"""Cost of finding what crosses the cuts of a model, beside a training step of it: both in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_sdpipe.partition.apart import apart
from lightning_sdpipe.pipeline.micro_batches import split
from recipes.harness.processes import PATIENCE, run_processes
from recipes.suites.grid import Goal, Ratios, Row, ratios, rotated
from recipes.suites.pipeline.bare_torch import MaskedLM, random_batch
from recipes.suites.stages import make_plan


def measure(
    *, num_stages: int, hidden_size: int, sequence: int, samples: int, num_micro_batches: int, repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Seconds of a plan with its rehearsal, and of forward and backward of a mini-batch.

    Args:
        num_stages: M.
        hidden_size: of a BERT of four layers.
        sequence: tokens of a sample.
        samples: of a micro-batch.
        num_micro_batches: of the mini-batch.
        repeats: timings of each.
        seed: of the weights and the tokens.
    """

    def compare(rank: int) -> list[Row]:
        module = MaskedLM(hidden_size, sequence, seed)
        batch = random_batch(samples * num_micro_batches, sequence, seed)
        parts = [part.batch for part in split(batch, num_micro_batches)]
        runs: dict[str, Callable[[], object]] = {
            "plan": lambda: apart(  # as the strategy does it
                partial(make_plan, module, num_stages, None, batch, num_micro_batches), PATIENCE
            ),
            "training step": partial(_train, module, parts),
        }
        for run in runs.values():
            run()
        return [
            {"what": name, "repeat": repeat, "seconds": _timed(runs[name])}
            for repeat in range(repeats)
            for name in rotated([*runs], repeat)
        ]

    (rows,) = run_processes(1, compare)
    meaning = f"set-up time of planning {num_stages} stages of a BERT of {hidden_size} × 4 layers, over a training step"
    goal = Goal(meaning, "seconds", {"what": "plan"}, {"what": "training step"}, 3.0)
    return rows, ratios(rows, {"rehearsal/steps": goal})


def _train(module: MaskedLM, parts: Sequence[Any]) -> None:
    module.zero_grad()
    for part in parts:
        (module.training_step(part, 0) / len(parts)).backward()  # type: ignore[no-untyped-call]


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
