"""Running one stage's part of the user's steps on one batch, forward only or as a part of training."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.p2p import labelled
from lightning_sdpipe.partition.cut_step import CutModel
from lightning_sdpipe.partition.message import Message
from lightning_sdpipe.partition.sending import Travel
from lightning_sdpipe.pipeline.digest import BatchDigest
from lightning_sdpipe.pipeline.link import StageLink
from lightning_sdpipe.pipeline.micro_batches import MicroBatch, Portion, whole
from lightning_sdpipe.pipeline.step_log import Log, StepLog, logging_through

StepContext = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Step:
    """A step method of the user's module, with what Lightning calls it with besides the batch."""

    name: str  # "training_step", "validation_step", "test_step" or "predict_step"
    arguments: tuple[Any, ...]
    context: StepContext  # the precision plugin's
    stream: tuple[int, ...] = ()  # what its random numbers depend on, besides the micro-batch
    loss_scale: Tensor | None = None  # of training in 16-bit mixed precision
    closes: bool = True  # does the optimizer step after it?
    generation: int = 0  # of the choice of layers that train, on which it depends what needs a gradient
    portion: Portion | None = None  # if the batch is one of the batch that all pipelines train together

    def key(self, micro_batch: MicroBatch) -> Hashable:
        """What identifies the shapes of the messages that this step sends for a micro-batch, on both ends."""
        return self.name, torch.is_grad_enabled(), self.generation, micro_batch.signature


@dataclass(frozen=True)
class StageRunner:
    """Runs the user's steps as the stage that owns the blocks of ``span``."""

    module: LightningModule
    cut_model: CutModel
    span: range
    link: StageLink
    travel: Mapping[str, Travel] = field(default_factory=dict)  # by the name of a step

    @property
    def is_first(self) -> bool:
        return self.link.stage == 0

    @property
    def is_last(self) -> bool:
        return self.link.stage == len(self.link.ranks) - 1

    def train(
        self, micro_batch: MicroBatch, number: int, step: Step, received: Message | None, log: StepLog
    ) -> Message | Tensor:
        """Runs micro-batch ``number`` of a mini-batch.

        Returns:
            The message to send on; on the last stage the loss, weighted by the micro-batch's share of the samples and
            scaled.
        """
        with logging_through(self.module, log.record(micro_batch.weight)), labelled("forward", number):
            outcome = self._run(micro_batch, number, step, received)
        if isinstance(outcome, Message):
            return outcome
        loss, weight = _loss(outcome), micro_batch.weight
        loss = loss if weight == 1.0 else loss * weight
        return loss if step.loss_scale is None else loss * step.loss_scale

    def evaluate(self, batch: Any, step: Step) -> Any:
        """Runs the forward of a whole mini-batch. Stages work on successive batches at the same time.

        Returns:
            What the user's step returns on the last stage, None on the others.
        """
        micro_batch = whole(batch)
        key = step.key(micro_batch)
        begin_batch([self], batch)
        received = None if self.is_first else self.link.receive_activations(key)
        with logging_through(self.module, _synchronised(self.module.log)):
            outcome = self._run(micro_batch, 0, step, received)
        if isinstance(outcome, Message):
            self.link.send_activations(outcome, key)
            return None
        return outcome

    def _run(self, micro_batch: MicroBatch, number: int, step: Step, received: Message | None) -> Any:
        method = getattr(self.module, step.name)
        travel = self.travel.get(step.name)
        stream = (*step.stream, number) if micro_batch.place is None else (*step.stream[:-1], *micro_batch.place)
        self.cut_model.streams.begin(*stream)
        with step.context():
            return self.cut_model.run(self.span, lambda: method(micro_batch.batch, *step.arguments), received, travel)


def begin_batch(runners: Sequence[StageRunner], batch: Any, parts: Sequence[MicroBatch] = ()) -> None:
    """The stages of ``runners`` begin with a mini-batch, which those beside them must have been given, too.

    Args:
        runners: of one worker.
        batch: the mini-batch.
        parts: its micro-batches.
    """
    if len(runners[0].link.ranks) > 1:
        splits = hasattr(runners[0].module, "split_batch")
        signatures = [part.signature for part in parts] if splits else []
        digest = BatchDigest(batch, signatures)
        for runner in runners:
            runner.link.begin(digest)


def _loss(outcome: Any) -> Tensor:
    loss = outcome.get("loss") if isinstance(outcome, Mapping) else outcome
    if not isinstance(loss, Tensor) or loss.ndim:
        raise ConfigurationError(
            f"training_step returned {type(outcome).__name__}; a pipeline needs a scalar loss tensor, or a dict with "
            "one under 'loss'. To skip a batch, return a loss multiplied by zero."
        )
    if loss.is_meta:
        raise ConfigurationError(
            "The loss is computed with weights that other stages hold (a sum over all parameters?), and a model that "
            "is built on meta cannot be rehearsed to find out which. Use the optimizer's weight_decay instead."
        )
    return loss


def _synchronised(log: Log) -> Log:
    """``log`` that reduces over the pipelines at the end of the epoch, so that all replicas see one value."""

    def synchronised(name: str, value: Any, *args: Any, **options: Any) -> None:
        log(name, value, *args, **{**options, "sync_dist": True})

    return synchronised
