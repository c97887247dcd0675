"""Cost of a flush: PipeDream's asynchronous 1F1B against 1F1B with a flush, with *emulated* compute.

Stages sleep for the time that they would compute, since on a machine with fewer cores than stages a bubble costs
nothing: another process takes the core. Sending, scheduling and the optimizer are real. A flush leaves every stage
idle for M − 1 of m + M − 1 micro-batches, so without it a mini-batch should take m / (m + M − 1) of the time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.pipeline.pipedream import PipeDreamPipeline
from lightning_sdpipe.worker.assembly import Assembled
from recipes.suites.emulated import FEATURES, LEARNING_RATE, EmulatedChain
from recipes.suites.processes import run_processes
from recipes.suites.ratios import Ratios, Row, ratio, rotated
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
    """Seconds of a mini-batch under both schedules, once the pipelines are full.

    Args:
        num_stages: M.
        num_micro_batches: each m to measure with.
        forward_seconds: of a micro-batch on one stage; a whole mini-batch takes m times as long.
        backward_seconds: likewise.
        steps: mini-batches of one timing.
        repeats: timings of each schedule.
        seed: of the data.
    """
    rows: list[Row] = []
    ratios: Ratios = {}
    for count in num_micro_batches:
        times = (forward_seconds, backward_seconds)
        timings = run_processes(num_stages, _compare, count, *times, steps, repeats, seed)[0]
        for repeat, seconds in enumerate(timings):
            for name, elapsed in seconds.items():
                row = {"what": f"{name}, emulated", "stages": num_stages, "micro_batches": count, "repeat": repeat}
                rows.append(row | {"ms_per_mini_batch": 1e3 * elapsed})
        expected = (count + num_stages - 1) / count
        ratios[f"pipedream/m{count}"] = ratio(
            [seconds["1f1b"] / seconds["pipedream"] for seconds in timings],
            0.9 * expected,
            f"throughput, {num_stages} stages, {count} micro-batches, emulated: pipedream over 1f1b with flush; "
            f"the bubble's share is {expected:.3f}",
        )
    return rows, ratios


def _compare(
    rank: int, count: int, forward_seconds: float, backward_seconds: float, steps: int, repeats: int, seed: int
) -> list[dict[str, float]]:
    """Seconds per mini-batch on this rank, of each schedule in each repeat."""
    groups, size = open_pipeline(), dist.get_world_size()
    batch = torch.rand(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    split = EmulatedChain(size, forward_seconds, backward_seconds)
    whole = EmulatedChain(size, count * forward_seconds, count * backward_seconds)
    flushing = open_stage(groups, split, ["blocks.*"], batch, "1f1b", count)
    asynchronous = open_stage(groups, whole, ["blocks.*"], batch, "pipedream")
    measured = {
        "1f1b": lambda: _flush(flushing, batch, steps),
        "pipedream": lambda: _pipedream(asynchronous, batch, steps),
    }
    timings = []
    for repeat in range(repeats):
        seconds = {}
        for name in rotated(list(measured), repeat):
            dist.barrier()
            seconds[name] = measured[name]()
        timings.append(seconds)
    return timings


def _flush(stage: Assembled, batch: Tensor, steps: int) -> float:
    optimizer = torch.optim.SGD(stage.freezing.trained, LEARNING_RATE)
    ends = []
    for iteration in range(1 + steps):
        optimizer.zero_grad()
        stage.pipeline.train(batch, TRAINING, iteration).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        ends.append(time.perf_counter())
    return (ends[-1] - ends[0]) / steps


def _pipedream(stage: Assembled, batch: Tensor, steps: int) -> float:
    """Count from when the pipeline is full until its last mini-batch enters."""
    pipeline, optimizer = stage.pipeline, torch.optim.SGD(stage.freezing.trained, LEARNING_RATE)
    assert isinstance(pipeline, PipeDreamPipeline)
    fill = dist.get_world_size()
    ends = []
    for iteration in range(fill + steps):
        filling = pipeline.filling
        optimizer.zero_grad()
        pipeline.train(batch, TRAINING, iteration).backward()  # type: ignore[no-untyped-call]
        if not filling:
            optimizer.step()
        ends.append(time.perf_counter())
    while pipeline.draining:
        optimizer.zero_grad()
        pipeline.drain().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    pipeline.settle()
    return (ends[-1] - ends[fill - 1]) / steps
