"""Pipelines with a flush: every micro-batch of a mini-batch is finished before the optimizer steps.

Forwards and backwards run in the order of a schedule of ``torch.distributed.pipelining``, so the result is that of one
process which accumulates over the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, ScheduleGPipe

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity.delays import DelayInjector
from lightning_sdpipe.partition.cut_step import Boundary, CutModel
from lightning_sdpipe.pipeline.gradients import loss_with_gradients, set_aside
from lightning_sdpipe.pipeline.link import StageLink
from lightning_sdpipe.pipeline.micro_batches import MicroBatch, split, whole
from lightning_sdpipe.pipeline.shared_parameters import SharedParameters
from lightning_sdpipe.pipeline.stage import CutStage
from lightning_sdpipe.pipeline.step_log import StepLog, logging_through

StepContext = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Step:
    """A step method of the user's module, with what Lightning calls it with besides the batch."""

    name: str  # "training_step", "validation_step", "test_step" or "predict_step"
    arguments: tuple[Any, ...]
    context: StepContext  # the precision plugin's


class FlushPipeline:
    """Runs this worker's stage of the user's steps.

    Args:
        module: the user's module.
        cut_model: the same module, cut.
        span: the blocks of this stage.
        link: this stage's connections to its neighbours.
        shared: the parameters that other stages hold too.
        delays: makes this worker sleep before its forward and backward, if it was asked to.
        num_micro_batches: how many micro-batches a mini-batch is split into.
    """

    def __init__(
        self,
        module: LightningModule,
        cut_model: CutModel,
        span: range,
        link: StageLink,
        shared: SharedParameters,
        delays: DelayInjector,
        num_micro_batches: int,
    ) -> None:
        self._module = module
        self._cut_model = cut_model
        self._span = span
        self._link = link
        self._shared = shared
        self._delays = delays
        self._stage = CutStage(module, link.stage, len(link.ranks), link)
        self._schedule = _schedule(self._stage, num_micro_batches)
        self._num_micro_batches = num_micro_batches
        self._parameters = [p for p in module.parameters() if p.requires_grad and p.device.type != "meta"]

    def train(self, batch: Any, step: Step, iteration: int) -> Tensor:
        """Runs forward and backward of a mini-batch.

        Returns:
            The loss, a scalar whose ``backward`` puts the gradients in place; zero on all stages but the last.
        """
        micro_batches = split(batch, self._num_micro_batches)
        log = StepLog()

        def forward(index: int, received: Boundary | None) -> Boundary | Tensor:
            micro_batch = micro_batches[index]
            with logging_through(self._module, log.record(micro_batch.size)):
                outcome = self._run(micro_batch, step, received)
            return outcome if isinstance(outcome, Boundary) else _loss(outcome) * micro_batch.weight

        before = set_aside(self._parameters)
        self._delays.before_forward(iteration)
        keys = [_key(m, step) for m in micro_batches]
        self._stage.begin(keys, forward, lambda: self._delays.before_backward(iteration))
        losses: list[Tensor] = []
        indices = torch.arange(self._num_micro_batches)  # the schedules want a target to call the loss function
        self._schedule.step(target=indices, losses=losses, return_outputs=False)
        self._link.settle()
        self._shared.sum_gradients()
        log.replay(self._module.log)
        loss = torch.stack([part.detach() for part in losses]).sum() if losses else self._no_loss()
        return loss_with_gradients(loss, self._parameters, before)

    def evaluate(self, batch: Any, step: Step) -> Any:
        """Runs the forward of a whole mini-batch. Stages work on successive batches at the same time.

        Returns:
            What the user's step returns on the last stage, None on the others.
        """
        micro_batch = whole(batch)
        key = _key(micro_batch, step)
        received = None if self._stage.is_first else self._link.receive_activations(key)
        with logging_through(self._module, _synchronised(self._module.log)):
            outcome = self._run(micro_batch, step, received)
        if isinstance(outcome, Boundary):
            self._link.send_activations(outcome, key)
            return None
        return outcome

    def settle(self) -> None:
        """Waits until the next stage has taken what :meth:`evaluate` sent."""
        self._link.settle()

    def _run(self, micro_batch: MicroBatch, step: Step, received: Boundary | None) -> Any:
        method = getattr(self._module, step.name)
        with step.context():
            return self._cut_model.run(self._span, lambda: method(micro_batch.batch, *step.arguments), received)

    def _no_loss(self) -> Tensor:
        return torch.zeros((), device=self._link.device)


def _schedule(stage: CutStage, num_micro_batches: int) -> PipelineScheduleSingle:
    # 1F1B needs a micro-batch for every stage; with fewer its order is GPipe's
    kind = Schedule1F1B if num_micro_batches >= stage.num_stages else ScheduleGPipe
    return kind(stage, num_micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)  # type: ignore[arg-type]


def _key(micro_batch: MicroBatch, step: Step) -> Hashable:
    return step.name, torch.is_grad_enabled(), micro_batch.signature


def _loss(outcome: Any) -> Tensor:
    loss = outcome.get("loss") if isinstance(outcome, Mapping) else outcome
    if not isinstance(loss, Tensor) or loss.ndim:
        raise ConfigurationError(
            f"training_step returned {type(outcome).__name__}; a pipeline needs a scalar loss tensor, or a dict with "
            "one under 'loss'. To skip a batch, return a loss multiplied by zero."
        )
    return loss


def _synchronised(log: Callable[..., None]) -> Callable[..., None]:
    """``log`` that reduces over the pipelines at the end of the epoch, so that all replicas see one value."""

    def synchronised(name: str, value: Any, *args: Any, **options: Any) -> None:
        log(name, value, *args, **{**options, "sync_dist": True})

    return synchronised
