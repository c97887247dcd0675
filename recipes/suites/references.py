"""Outside references: Lightning's own DDP, and bare ``torch.distributed.pipelining`` with an all-reduce.

Nothing of this project takes part in them but the emulated blocks and the injected delays. A worker sleeps at the start
of an iteration, as it does under :class:`~lightning_sdpipe.SDPipeStrategy`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lightning_sdpipe.heterogeneity.delays import Delays
from lightning_sdpipe.heterogeneity.injector import DelayInjector
from recipes.suites.cases import EmulatedCase, only_delays
from recipes.suites.emulated import FEATURES, LEARNING_RATE, EmulatedChain, passes
from recipes.suites.processes import TRANSFER_TIMEOUT, run_processes
from recipes.suites.stages import CPU
from recipes.suites.worker_reports import Counters, Probe, WorkerReport, counters

TIMEOUT_SECONDS = 600.0


class DelayedProbe(Probe):
    """Delays the workers of Lightning's DDP, each a pipeline of one stage, and reports what they do."""

    def __init__(self, directory: Path, warm_up: int, delays: Delays, compute_seconds: float) -> None:
        super().__init__(directory, warm_up)
        self._delays = delays
        self._compute_seconds = compute_seconds  # of an iteration
        self._injector: DelayInjector | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._injector is None:
            self._injector = DelayInjector(self._delays, 0, trainer.global_rank, trainer.global_rank)
        self._injector.before_forward(batch_idx)

    def now(self, trainer: L.Trainer) -> Counters:
        assert self._injector is not None
        return replace(
            counters(self._injector),
            computed=self._iterations * self._compute_seconds,
            groups=self._iterations,
            members=self._iterations * trainer.world_size,
        )

    def place(self, trainer: L.Trainer) -> tuple[int, int]:
        return 0, trainer.global_rank


def lightning_ddp() -> DDPStrategy:
    """Return the strategy as a user gets it, on processes that are forked like ours."""
    return DDPStrategy(start_method="fork", process_group_backend="gloo")


def bare_torch(case: EmulatedCase, seconds: float) -> list[WorkerReport]:
    """Train emulated blocks in torch's 1F1B, with the gradients all-reduced over each stage before each step.

    Args:
        case: what is trained.
        seconds: of a micro-batch on one stage.

    Raises:
        ConfigurationError: a heterogeneity that it cannot be given.
    """
    return run_processes(case.workers, _train, case, passes(seconds), only_delays(case), timeout=TIMEOUT_SECONDS)


def _train(rank: int, case: EmulatedCase, seconds: tuple[float, float], delays: Delays) -> WorkerReport:
    num_stages, num_pipelines, num_micro_batches = case.num_stages, case.num_pipelines, case.num_micro_batches
    pipeline, stage = divmod(rank, num_stages)  # torch wants stage j on rank j; ours go the other way
    own_pipeline = _group([range(i * num_stages, (i + 1) * num_stages) for i in range(num_pipelines)], pipeline)
    own_stage = _group([range(j, dist.get_world_size(), num_stages) for j in range(num_stages)], stage)
    block = EmulatedChain(num_stages, *seconds, case.num_parameters).blocks[stage]
    features, sent = torch.empty(1, FEATURES), torch.empty(1, FEATURES, requires_grad=True)
    runner = PipelineStage(
        block, stage, num_stages, CPU, input_args=features if stage == 0 else sent, output_args=sent, group=own_pipeline
    )
    schedule = Schedule1F1B(runner, num_micro_batches, loss_fn=lambda output, _: output.mean())
    optimizer = torch.optim.SGD(block.parameters(), LEARNING_RATE)
    injector = DelayInjector(delays, stage, pipeline)
    batch = torch.rand(num_micro_batches, FEATURES, generator=torch.Generator().manual_seed(pipeline))
    inputs, target = (batch,) if stage == 0 else (), batch if stage == num_stages - 1 else None
    before, averaging = counters(injector), 0.0
    for iteration in range(case.iterations):
        if iteration == case.warm_up:
            before, averaging = counters(injector), 0.0
        optimizer.zero_grad()
        injector.before_forward(iteration)
        schedule.step(*inputs, target=target, return_outputs=False)
        start = time.perf_counter()
        for parameter in block.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=own_stage)
            parameter.grad.div_(num_pipelines)
        averaging += time.perf_counter() - start
        optimizer.step()
    used = counters(injector, averaging=averaging) - before
    counted = case.iterations - case.warm_up
    computed = counted * num_micro_batches * sum(seconds)  # torch does not say: as emulated
    members = counted * num_pipelines
    return WorkerReport(stage, pipeline, counted, replace(used, computed=computed, groups=counted, members=members))


def _group(all_ranks: Sequence[Sequence[int]], own: int) -> Any:
    """Every rank must make every group."""
    return [dist.new_group(list(ranks), timeout=TRANSFER_TIMEOUT) for ranks in all_ranks][own]
