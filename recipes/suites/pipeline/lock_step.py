"""Cost of lock step: a loop that repeatedly calls a cut model outside of training, with *emulated* compute.

Every block sleeps for the time of its call, as it does in one process, so the difference is the cost of messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.harness.processes import run_processes
from recipes.suites.emulated import FEATURES, EmulatedChain
from recipes.suites.grid import Ratios, Row, compared, ratios, versus
from recipes.suites.stages import open_pipeline, open_stage


def measure(
    *, num_stages: int, blocks: int, block_seconds: float, tokens: int, repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Return tokens per second of a loop in which each token is a call of all blocks.

    Args:
        num_stages: M.
        blocks: number of the model's blocks.
        block_seconds: seconds of a call of a block.
        tokens: number of tokens in one timing.
        repeats: timings of each.
        seed: seed of the data.
    """
    rows = run_processes(num_stages, _compare, blocks, block_seconds, tokens, repeats, seed)[0]
    meaning = (
        f"tokens per second, {num_stages} stages, {blocks} blocks of {1e3 * block_seconds:g} ms, emulated: lock step "
        "over one process"
    )
    goal = versus(meaning, "tokens_per_s", "lock step", "one process", 0.4)
    return rows, ratios(rows, {f"lock_step/M{num_stages}": goal})


def _compare(rank: int, blocks: int, block_seconds: float, tokens: int, repeats: int, seed: int) -> list[Row]:
    batch = torch.rand(1, FEATURES, generator=torch.Generator().manual_seed(seed))
    cut, whole = (EmulatedChain(blocks, block_seconds, 0.0) for _ in range(2))
    open_stage(open_pipeline(), cut, ["blocks.*"], batch)
    models = {"lock step": cut.blocks, "one process": whole.blocks}
    return compared({name: partial(_timed, model, batch, tokens) for name, model in models.items()}, repeats)


def _timed(model: Callable[[Tensor], Tensor], state: Tensor, tokens: int) -> Row:
    with torch.no_grad():
        state = model(state)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(tokens):
            state = model(state)
        return {"emulated": True, "tokens_per_s": tokens / (time.perf_counter() - start)}
