"""The asynchronous 1F1B of PipeDream: no flush between mini-batches (SDPipe §3.1, Algorithm 1, step A).

Stages are counted from 0 here, and d = M − 1 − j is how far stage j runs ahead of its backwards.

Order. On mini-batch k, stage j runs the forward of k, and then, if k ≥ d, the backward of k − d, whose gradient the
optimizer applies at once. The first d mini-batches of an epoch only fill the pipeline. At the end of the epoch the
pipeline drains: the remaining d backwards follow, each with its optimizer step, so every mini-batch is trained on
exactly once.

Stash. The forward of k runs on a copy of the weights as they are then, and so does its backward (weight stashing). At
most d + 1 = M − j mini-batches are in flight on stage j, each with its copy; the last stage needs none.

Staleness. The gradient of mini-batch k is computed with weights that have seen the mini-batches up to k − d − 1, and
is applied to the newest weights, which have seen those up to k − 1: it is d steps late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_sdpipe.heterogeneity.injector import DelayInjector
from lightning_sdpipe.partition.message import Message
from lightning_sdpipe.pipeline.gradients import GradientExchange, loss_with_gradients
from lightning_sdpipe.pipeline.micro_batches import whole
from lightning_sdpipe.pipeline.stage_runner import AFTER_THE_STEP, StageRunner, Step
from lightning_sdpipe.pipeline.step_log import StepLog


@dataclass(frozen=True)
class _InFlight:
    """A mini-batch whose backward is still to come."""

    iteration: int
    inputs: Sequence[Tensor]  # what was received and needs a gradient
    outputs: Sequence[Tensor]  # what was sent and gets one; on the last stage the loss
    weights: Sequence[Tensor]  # the leaves that the forward ran on, in the order of the parameters


class PipeDreamPipeline:
    """Trains this worker's stage.

    Args:
        runner: runs this stage's part of a step.
        parameters: this stage's trained parameters; none may be shared with another stage. The sequence may change
            when nothing is in flight.
        delays: makes this worker slow, if it was asked to.
    """

    def __init__(self, runner: StageRunner, parameters: Sequence[nn.Parameter], delays: DelayInjector) -> None:
        self._runner = runner
        self._parameters = parameters
        self._delays = delays
        self._depth = len(runner.link.ranks) - 1 - runner.link.stage
        self._in_flight: deque[_InFlight] = deque()
        self._steps = _Steps(runner.module)
        self._names = {id(p): f"module.{name}" for name, p in runner.module.named_parameters()}

    @property
    def filling(self) -> bool:
        """The next :meth:`train` runs a forward only, so no optimizer step may follow it."""
        return len(self._in_flight) < self._depth

    @property
    def draining(self) -> bool:
        """Backwards are left that only :meth:`drain` will run."""
        return bool(self._in_flight)

    def train(
        self,
        batch: Any,
        step: Step,
        iteration: int,
        exchange: GradientExchange | None = None,
        accumulated: bool = False,
        ready: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Runs the forward of a mini-batch and the backward that is due.

        Args:
            batch: the whole mini-batch.
            step: the user's method.
            iteration: counts mini-batches.
            exchange: what an update that follows replaces gradients by; not used while the pipeline fills.
            accumulated: False; every gradient is applied at once.
            ready: called when this worker needs nothing more from others to compute the gradient that is due; not
                while the pipeline fills.

        Returns:
            The loss of this mini-batch, a scalar (nan on all stages but the last, which will know it later). Its
            ``backward`` puts the gradient of the mini-batch that is due in place, or none while the pipeline fills.
        """
        filling = self.filling
        loss = self._forward(batch, step, iteration)
        return loss_with_gradients(loss, [], []) if filling else self._backward(loss, exchange, ready)

    def drain(self, exchange: GradientExchange | None = None, ready: Callable[[], None] = lambda: None) -> Tensor:
        """Runs the oldest backward that is left; returns a zero whose ``backward`` puts its gradient in place."""
        return self._backward(torch.zeros((), device=self._runner.link.device), exchange, ready)

    def settle(self) -> None:
        """Waits until the neighbours have taken everything that was sent."""
        self._runner.link.settle()

    def _forward(self, batch: Any, step: Step, iteration: int) -> Tensor:
        runner, log = self._runner, StepLog()
        micro_batch = whole(batch)
        key = step.key(micro_batch)
        received = None if runner.is_first else runner.link.receive_activations(key)
        self._delays.before_forward(iteration)
        weights: Sequence[Tensor] = self._parameters if runner.is_last else self._stash()
        names = [self._names[id(p)] for p in self._parameters]
        replaced = {} if runner.is_last else dict(zip(names, weights, strict=True))
        with self._delays.computing():
            run = partial(runner.train, micro_batch, 0, step, received, log)
            outcome = functional_call(self._steps, replaced, (run,))
        runner.cut_model.streams.begin(*step.stream, AFTER_THE_STEP)
        if isinstance(outcome, Message):
            runner.link.send_activations(outcome, key)
            outputs = [t for t in outcome.tensors if t.requires_grad]
            loss = torch.full((), torch.nan, device=runner.link.device)
        else:
            outputs, loss = [outcome], outcome.detach()
        inputs = [t for t in received.tensors if t.requires_grad] if received else []
        self._in_flight.append(_InFlight(iteration, inputs, outputs, weights))
        log.replay(runner.module.log)
        return loss

    def _stash(self) -> list[Tensor]:
        return [p.detach().clone().requires_grad_() for p in self._parameters]

    def _backward(self, loss: Tensor, exchange: GradientExchange | None, ready: Callable[[], None]) -> Tensor:
        runner, oldest = self._runner, self._in_flight.popleft()
        outputs, gradients = (oldest.outputs, None) if runner.is_last else runner.link.receive_gradients(oldest.outputs)
        self._delays.before_backward(oldest.iteration)
        runner.link.make_room()
        ready()
        leaves = [*oldest.inputs, *oldest.weights]
        hooks = []
        if exchange is not None:
            hooks = [
                leaf.register_hook(partial(exchange.ready, number))  # type: ignore[no-untyped-call]
                for number, leaf in enumerate(oldest.weights)
            ]
        results: Sequence[Tensor | None] = [None] * len(leaves)
        if leaves and outputs:  # else all of this stage, or of it and those before, is frozen
            with self._delays.computing():
                results = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
        for hook in hooks:
            hook.remove()
        to_send, to_apply = results[: len(oldest.inputs)], results[len(oldest.inputs) :]
        if not runner.is_first:
            runner.link.send_gradients(oldest.inputs, to_send)
        return loss_with_gradients(loss, self._parameters, to_apply, exchange=exchange)


class _Steps(nn.Module):
    """Makes ``functional_call`` run any function with the module's parameters replaced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Any) -> Any:
        return run()
