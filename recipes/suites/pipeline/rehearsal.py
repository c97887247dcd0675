"""Cost of finding what crosses a model's cuts, beside one of its training steps, both in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_sdpipe.partition.apart import apart
from lightning_sdpipe.pipeline.micro_batches import split
from recipes.harness.processes import PATIENCE, run_processes
from recipes.suites.grid import Ratios, Row, compared, ratios, versus
from recipes.suites.pipeline.bare_torch import MaskedLM, random_batch
from recipes.suites.stages import make_plan


def measure(
    *, num_stages: int, hidden_size: int, sequence: int, samples: int, num_micro_batches: int, repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Return the seconds of a plan with its rehearsal, and of forward and backward of a mini-batch.

    Args:
        num_stages: M.
        hidden_size: hidden size of a BERT of four layers.
        sequence: number of tokens in a sample.
        samples: number of samples in a micro-batch.
        num_micro_batches: number of micro-batches in the mini-batch.
        repeats: timings of each.
        seed: seed of the weights and the tokens.
    """

    def compare(rank: int) -> list[Row]:
        module = MaskedLM(hidden_size, sequence, seed)
        batch = random_batch(samples * num_micro_batches, sequence, seed)
        parts = [part.batch for part in split(batch, num_micro_batches)]
        runs: dict[str, Callable[[], object]] = {
            "plan": lambda: apart(  # as in the strategy
                partial(make_plan, module, num_stages, None, batch, num_micro_batches), PATIENCE
            ),
            "training step": partial(_train, module, parts),
        }
        for run in runs.values():
            run()
        return compared({name: partial(_timed, run) for name, run in runs.items()}, repeats)

    (rows,) = run_processes(1, compare)
    meaning = f"set-up time of planning {num_stages} stages of a BERT of {hidden_size} × 4 layers, over a training step"
    return rows, ratios(rows, {"rehearsal/steps": versus(meaning, "seconds", "plan", "training step", 3.0)})


def _train(module: MaskedLM, parts: Sequence[Any]) -> None:
    module.zero_grad()
    for part in parts:
        (module.training_step(part, 0) / len(parts)).backward()  # type: ignore[no-untyped-call]


def _timed(run: Callable[[], object]) -> Row:
    start = time.perf_counter()
    run()
    return {"seconds": time.perf_counter() - start}
