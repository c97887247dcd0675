"""Runs one stage's part of the user's steps on a batch, for training or evaluation.

The values that ``self.log`` gets for the micro-batches of a mini-batch become one value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Number
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.lightning_internals import type_of_logged_values
from lightning_sdpipe.lightning_results import set_value_of_batch, value_of_batch
from lightning_sdpipe.p2p import labelled
from lightning_sdpipe.partition.cut_step import CutModel
from lightning_sdpipe.partition.effects import logging_to
from lightning_sdpipe.partition.message import Message, Travel
from lightning_sdpipe.pipeline.digest import BatchDigest, options_of
from lightning_sdpipe.pipeline.link import StageLink
from lightning_sdpipe.pipeline.lock_step import LockStep
from lightning_sdpipe.pipeline.micro_batches import MicroBatch, Portion, whole

StepContext = Callable[[], AbstractContextManager[Any]]
Log = Callable[..., None]


class StepLog:
    """Collects what each micro-batch logs and logs it once: means weighted as the losses are, or the sum, minimum or
    maximum that ``reduce_fx`` asks for. A torchmetrics object accumulates by itself and is logged as it is, with the
    mean over the micro-batches as the step's value. If a step logs a name several times, so does this: the first values
    are combined, then the second ones, and so on."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, int], list[tuple[Any, float]]] = {}
        self._batch_sizes: dict[tuple[str, int], int] = {}
        self._options: dict[tuple[str, int], dict[str, Any]] = {}
        self._of_metrics: dict[tuple[str, int], list[tuple[Any, float]]] = {}

    def record(self, weight: float) -> Log:
        """Return a replacement for ``LightningModule.log`` while a micro-batch of this weight runs. The user's
        ``batch_size`` takes precedence over the weight."""
        calls: dict[str, int] = {}

        def log(name: str, value: Any, *args: Any, batch_size: int | None = None, **options: Any) -> None:
            if args:  # prog_bar, logger, on_step and on_epoch may be given by position
                options |= dict(zip(("prog_bar", "logger", "on_step", "on_epoch"), args, strict=False))
            if isinstance(value, Tensor):
                value = value.detach()
            calls[name] = calls.get(name, 0) + 1
            key = name, calls[name]
            if isinstance(value, Metric):
                self._of_metrics.setdefault(key, []).append((value_of_batch(value), batch_size or weight))
            self._values.setdefault(key, []).append((value, batch_size or weight))
            if batch_size:
                self._batch_sizes[key] = self._batch_sizes.get(key, 0) + batch_size
            self._options[key] = options

        return log

    def replay(self, log: Log) -> None:
        """Call ``log`` once for each call that a micro-batch made. Values are reduced over the pipelines when the epoch
        ends, never in a step."""
        for key, entries in self._values.items():
            options = {**self._options[key], "sync_dist": True}
            value = _combine(entries, options.get("reduce_fx", "mean"))
            of_batch = self._of_metrics.get(key, ())
            if of_batch and all(isinstance(v, Tensor) for v, _ in of_batch):
                set_value_of_batch(value, _combine([*of_batch], "mean"))
            log(key[0], value, batch_size=self._batch_sizes.get(key), **options)  # else Lightning counts the mini-batch


def _combine(entries: list[tuple[Any, float]], reduce_fx: Any) -> Any:
    value = entries[-1][0]
    if isinstance(value, Metric) or not isinstance(value, (Tensor, Number)) or len(entries) == 1:
        return value
    name = reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__
    values = torch.stack([_as_logged(v) for v, _ in entries])
    if name in ("sum", "min", "max"):
        return getattr(torch, name)(values)
    weights = torch.tensor([weight for _, weight in entries], dtype=values.dtype, device=values.device)
    return (values * weights).sum() / weights.sum()


def _as_logged(value: Tensor | float) -> Tensor:
    """Convert a value to the type in which Lightning accumulates it. Ranks reduce what they have logged, so the type
    must not depend on the number of micro-batches, which differs between ranks if batches are divided by speed."""
    if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64):
        return value
    return torch.as_tensor(value, dtype=type_of_logged_values())


@dataclass(frozen=True)
class Step:
    """A step method of the user's module, with the arguments that Lightning passes besides the batch."""

    name: str  # "training_step", "validation_step", "test_step" or "predict_step"
    arguments: tuple[Any, ...]
    context: StepContext  # the precision plugin's
    stream: tuple[int, ...] = ()  # with the micro-batch's number, the key of its random stream
    loss_scale: Tensor | None = None  # the loss scale of 16-bit mixed precision
    share: float = 1.0  # the mini-batch's share of its update; its loss is multiplied by this before the backward
    closes: bool = True  # whether the optimizer steps after it
    generation: int = 0  # the number of the present choice of trained layers, which decides what needs a gradient
    portion: Portion | None = None  # if the batch is a portion of the batch that all pipelines train together
    optimizers: Sequence[Optimizer] = ()  # the optimizers that step with it
    returns: Callable[[Any, float], None] | None = None  # with a single stage: takes results that are no tensors

    def key(self, micro_batch: MicroBatch) -> Hashable:
        """Return the key that identifies, on both ends, the shapes of the messages that this step sends for a
        micro-batch."""
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
        self, micro_batch: MicroBatch, number: int, step: Step, received: Message | None, log: StepLog | None
    ) -> Message | Tensor:
        """Run micro-batch ``number`` of a mini-batch. ``log`` collects what it logs; None if it is the only one.

        Returns:
            The message to send on or, on the last stage, the loss, multiplied by the micro-batch's weight, the step's
            share and the loss scale.
        """
        through = _synchronised(self.module.log) if log is None else log.record(micro_batch.weight)
        with logging_to(self.module, through), labelled("forward", number):
            outcome = self._run(micro_batch, number, step, received)
        if isinstance(outcome, Message):
            return outcome
        if step.returns is not None and not isinstance(outcome, Tensor):
            step.returns(outcome, micro_batch.weight)
            if outcome is None:
                return torch.zeros((), device=self.link.device, requires_grad=True)
        loss, weight = _loss(outcome, step.returns is None), micro_batch.weight * step.share
        loss = loss if weight == 1.0 else loss * weight
        return loss if step.loss_scale is None else loss * step.loss_scale

    def evaluate(self, batch: Any, step: Step) -> Any:
        """Run the forward of a whole mini-batch. Stages work on successive batches at the same time.

        Returns:
            The result of the user's step on the last stage, None on the others.
        """
        micro_batch = whole(batch)
        key = step.key(micro_batch)
        begin_batch([self], batch)
        received = None if self.is_first else self.link.receive_activations(key)
        with logging_to(self.module, _synchronised(self.module.log)):
            outcome = self._run(micro_batch, 0, step, received)
        if isinstance(outcome, Message):
            self.link.send_activations(outcome, key)
            return None
        return outcome

    def evaluate_together(self, batch: Any, step: Step, lock_step: LockStep) -> Any:
        """Run a whole step on a mini-batch, on all stages at the same time."""
        self.cut_model.streams.begin(*step.stream, 0)
        run = partial(getattr(self.module, step.name), batch, *step.arguments)
        with logging_to(self.module, _synchronised(self.module.log)), step.context():
            return lock_step.evaluate(step.name, batch, run)

    def _run(self, micro_batch: MicroBatch, number: int, step: Step, received: Message | None) -> Any:
        method = getattr(self.module, step.name)
        travel = self.travel.get(step.name)
        stream = (*step.stream, number) if micro_batch.place is None else (*step.stream[:-1], *micro_batch.place)
        self.cut_model.streams.begin(*stream)
        with step.context():
            return self.cut_model.run(self.span, lambda: method(micro_batch.batch, *step.arguments), received, travel)


class CollectiveGuard:
    """Tracks which of the user's methods runs. A method that other stages do not run, or do not run to its end, may
    make no collective call: it would wait for the other ranks in vain, or meet them at another call. The context that
    :meth:`running` returns ends the method.

    Args:
        num_stages: M. A single stage runs everything.
        metrics: returns the metrics of the user's module.
    """

    def __init__(self, num_stages: int, metrics: Callable[[], Sequence[Metric]] = tuple) -> None:
        self._num_stages = num_stages
        self._metrics = metrics
        self._now = ""
        self.rehearsing = False
        self.communicates = False
        """Whether a step that was rehearsed here communicates with other pipelines."""

    @property
    def in_step(self) -> bool:
        """True while a step runs."""
        return self._now.endswith("_step")

    def running(self, name: str) -> Self:
        """Note that a step, or a hook that runs on last stages only, runs within this context."""
        self._now = name
        return self

    def __enter__(self) -> None:
        """Do nothing: :meth:`running` has noted the method."""

    def __exit__(self, *_: object) -> None:
        self._now = ""

    @contextmanager
    def rehearsal(self, name: str) -> Iterator[None]:
        """Note that one process rehearses a step within the context, while the others wait for the result."""
        self.rehearsing = True
        before = [(metric, metric.distributed_available_fn) for metric in self._metrics()]
        for metric, _ in before:
            metric.distributed_available_fn = self._has_no_replicas
        try:
            with self.running(name):
                yield
        finally:
            self.rehearsing = False
            for metric, available in before:
                metric.distributed_available_fn = available

    def _has_no_replicas(self) -> bool:
        """Answer a metric that asks whether to gather its state from all pipelines, and note the question."""
        self.communicates = True
        return False

    @property
    def ends_evaluation(self) -> bool:
        """True while a hook for the end of an epoch runs on last stages only."""
        return self._now.endswith("_epoch_end")

    def check(self, what: str) -> None:
        """Raise ConfigurationError if ``what``, which all ranks must call, is called where some ranks do not."""
        if not self._now or self._num_stages == 1:
            return
        stage = self._now.removeprefix("on_").partition("_")[0]
        instead = "on_train_batch_end" if stage == "training" else f"on_{stage}_end"
        reason = "ends where its stage ends" if self.in_step else "runs on last stages only, where results are"
        raise ConfigurationError(
            f"{what} was called in {self._now}, which {reason}, so other ranks would be waited for in vain. Call it in "
            f"{instead}, which runs on every rank."
        )

    @contextmanager
    def result_hook(self, name: str, parameters: Callable[[], Sequence[Tensor]]) -> Iterator[None]:
        """Guard a hook, within the context, that runs on last stages only.

        Raises:
            ConfigurationError: the hook is for the end of an epoch, and changed ``parameters``.
        """
        looks = self._num_stages > 1 and name.endswith("_epoch_end")
        before = _sums(parameters()) if looks else []
        with self.running(name):
            yield
        if looks and _sums(parameters()) != before:
            raise ConfigurationError(
                f"{name} changed parameters, and it runs on last stages only. Change them in "
                f"{name.replace('_epoch', '')}, which runs on every rank."
            )


def _sums(tensors: Sequence[Tensor]) -> list[str]:
    return [str(tensor.sum(dtype=torch.float64).item()) for tensor in tensors]  # as text, since nan != nan


def begin_batch(
    runners: Sequence[StageRunner], batch: Any, parts: Sequence[MicroBatch] = (), optimizers: Sequence[Optimizer] = ()
) -> None:
    """Begin a mini-batch on the stages of ``runners``; their neighbours must have been given the same one.

    Args:
        runners: the runners of one worker.
        batch: the mini-batch.
        parts: its micro-batches.
        optimizers: the optimizers that step with it, whose options must be the same on all stages.
    """
    if len(runners[0].link.ranks) > 1:
        splits = hasattr(runners[0].module, "split_batch")
        signatures = [part.signature for part in parts] if splits else []
        digest = BatchDigest(batch, signatures, options_of(optimizers))
        for runner in runners:
            runner.link.begin(digest)


def _loss(outcome: Any, is_cut: bool) -> Tensor:
    loss = outcome.get("loss") if isinstance(outcome, Mapping) else outcome
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        if not is_cut:
            ClosureResult.from_training_step_output(outcome)  # raises Lightning's own error
        raise ConfigurationError(
            f"training_step returned {type(outcome).__name__}; a pipeline needs a loss of one number, or a dict with "
            "one under 'loss'. To skip a batch where the model is cut, return a loss multiplied by zero."
        )
    if loss.is_meta:
        raise ConfigurationError(
            "The loss is computed with weights that other stages hold (a sum over all parameters?), and a model that "
            "is built on meta cannot be rehearsed to find out which. Use the optimizer's weight_decay instead."
        )
    return loss.reshape(()) if loss.ndim else loss


def _synchronised(log: Log) -> Log:
    """Return a ``log`` that reduces over the pipelines at the end of the epoch, so that all replicas see one value."""

    def synchronised(name: str, value: Any, *args: Any, **options: Any) -> None:
        log(name, value, *args, **{**options, "sync_dist": True})

    return synchronised
