"""Cost of a flush: PipeDream's asynchronous 1F1B against 1F1B with a flush, with *emulated* compute.

Stages sleep for the time that they would compute, since on a machine with fewer cores than stages a bubble costs
nothing: another process takes the core. Sending, scheduling and the optimizer are real. A flush leaves every stage idle
for M − 1 of m + M − 1 micro-batches, so without it a mini-batch should take m / (m + M − 1) of the time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.pipeline.pipedream import PipeDreamPipeline
from lightning_sdpipe.worker.assembly import Assembled
from recipes.harness.processes import run_processes
from recipes.suites.emulated import FEATURES, LEARNING_RATE, EmulatedChain
from recipes.suites.grid import Ratios, Row, compared, ratios, versus
from recipes.suites.stages import TRAINING, open_pipeline, open_stage


def measure(
    *,
    num_stages: int,
    num_micro_batches: Sequence[int],
    forward_seconds: float,
    backward_seconds: float,
    steps: int,
    repeats: int,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Return the time of a mini-batch under both schedules, once the pipelines are full.

    Args:
        num_stages: M.
        num_micro_batches: the numbers m to measure with.
        forward_seconds: forward seconds of a micro-batch on one stage; a whole mini-batch takes m times as long.
        backward_seconds: backward seconds of a micro-batch on one stage.
        steps: number of mini-batches in one timing.
        repeats: timings of each schedule.
        seed: seed of the data.
    """
    rows: list[Row] = []
    goals = {}
    for count in num_micro_batches:
        arguments = (count, forward_seconds, backward_seconds, steps, repeats, seed)
        columns = {"emulated": True, "stages": num_stages, "micro_batches": count}
        rows += [columns | row for row in run_processes(num_stages, _compare, *arguments)[0]]
        expected = (count + num_stages - 1) / count
        meaning = (
            f"throughput, {num_stages} stages, {count} micro-batches, emulated: pipedream over 1f1b with flush; "
            f"the bubble's share is {expected:.3f}"
        )
        of = "ms_per_mini_batch", "1f1b", "pipedream", 0.9 * expected
        goals[f"pipedream/m{count}"] = versus(meaning, *of, micro_batches=count)
    return rows, ratios(rows, goals)


def _compare(
    rank: int, count: int, forward_seconds: float, backward_seconds: float, steps: int, repeats: int, seed: int
) -> list[Row]:
    """Return the milliseconds of a mini-batch on this rank, for each schedule and repeat."""
    groups, size = open_pipeline(), dist.get_world_size()
    batch = torch.rand(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    split = EmulatedChain(size, forward_seconds, backward_seconds)
    whole = EmulatedChain(size, count * forward_seconds, count * backward_seconds)
    stages = {
        "1f1b": open_stage(groups, split, ["blocks.*"], batch, "1f1b", count),
        "pipedream": open_stage(groups, whole, ["blocks.*"], batch, "pipedream"),
    }
    return compared({name: partial(_timed, stage, batch, steps) for name, stage in stages.items()}, repeats)


def _timed(stage: Assembled, batch: Tensor, steps: int) -> Row:
    """Time the mini-batches after the pipeline is full or, with a flush, after the first one."""
    dist.barrier()
    optimizer = torch.optim.SGD(stage.freezing.trained, LEARNING_RATE)
    pipeline = stage.pipeline if isinstance(stage.pipeline, PipeDreamPipeline) else None
    ends, fill = [], 1 if pipeline is None else dist.get_world_size()
    for iteration in range(fill + steps):
        filling = pipeline is not None and pipeline.filling
        optimizer.zero_grad()
        stage.pipeline.train(batch, TRAINING, iteration).backward()  # type: ignore[no-untyped-call]
        if not filling:
            optimizer.step()
        ends.append(time.perf_counter())
    while pipeline is not None and pipeline.draining:
        optimizer.zero_grad()
        pipeline.drain().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if pipeline is not None:
        pipeline.settle()
    return {"ms_per_mini_batch": 1e3 * (ends[-1] - ends[fill - 1]) / steps}
