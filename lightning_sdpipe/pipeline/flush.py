"""Pipelines with a flush: every micro-batch of a mini-batch is finished before the optimizer steps.

Forwards and backwards run in the order of a schedule of ``torch.distributed.pipelining``, so the result is that of one
process which accumulates over the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, ScheduleGPipe

from lightning_sdpipe.heterogeneity.delays import DelayInjector
from lightning_sdpipe.partition.cut_step import Boundary
from lightning_sdpipe.pipeline.gradients import loss_with_gradients, put_back, set_aside
from lightning_sdpipe.pipeline.micro_batches import split
from lightning_sdpipe.pipeline.shared_parameters import SharedParameters
from lightning_sdpipe.pipeline.stage import CutStage
from lightning_sdpipe.pipeline.stage_runner import StageRunner, Step
from lightning_sdpipe.pipeline.step_log import StepLog


class FlushPipeline:
    """Trains this worker's stage.

    Args:
        runner: runs this stage's part of a step.
        parameters: this stage's trained parameters.
        shared: those that other stages hold too.
        delays: makes this worker sleep before its forward and backward, if it was asked to.
        schedule: ``"1f1b"`` or ``"gpipe"``.
        num_micro_batches: how many micro-batches a mini-batch is split into.
    """

    def __init__(
        self,
        runner: StageRunner,
        parameters: Sequence[nn.Parameter],
        shared: SharedParameters,
        delays: DelayInjector,
        schedule: str,
        num_micro_batches: int,
    ) -> None:
        self._runner = runner
        self._parameters = parameters
        self._shared = shared
        self._delays = delays
        self._stage = CutStage(runner.module, runner.link.stage, len(runner.link.ranks), runner.link)
        self._schedule = _schedule(schedule, self._stage, num_micro_batches)
        self._num_micro_batches = num_micro_batches

    def train(self, batch: Any, step: Step, iteration: int) -> Tensor:
        """Runs forward and backward of a mini-batch.

        Returns:
            The loss, a scalar whose ``backward`` puts the gradients in place; zero on all stages but the last.
        """
        micro_batches = split(batch, self._num_micro_batches)
        log = StepLog()

        def forward(index: int, received: Boundary | None) -> Boundary | Tensor:
            return self._runner.train(micro_batches[index], step, received, log)

        before = set_aside(self._parameters)
        self._delays.before_forward(iteration)
        keys = [step.key(micro_batch) for micro_batch in micro_batches]
        self._stage.begin(keys, forward, lambda: self._delays.before_backward(iteration))
        losses: list[Tensor] = []
        indices = torch.arange(self._num_micro_batches)  # the schedules want a target to call the loss function
        self._schedule.step(target=indices, losses=losses, return_outputs=False)
        self._runner.link.settle()
        self._shared.sum_gradients()
        log.replay(self._runner.module.log)
        loss = torch.stack([part.detach() for part in losses]).sum() if losses else torch.zeros(())
        gradients = set_aside(self._parameters)
        put_back(self._parameters, before)
        return loss_with_gradients(loss.to(self._stage.device), self._parameters, gradients)


def _schedule(name: str, stage: CutStage, num_micro_batches: int) -> PipelineScheduleSingle:
    # 1F1B needs a micro-batch for every stage; with fewer its order is GPipe's
    kind = Schedule1F1B if name == "1f1b" and num_micro_batches >= stage.num_stages else ScheduleGPipe
    return kind(stage, num_micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)  # type: ignore[arg-type]
