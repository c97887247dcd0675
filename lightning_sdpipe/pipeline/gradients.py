"""Hands a pipeline's gradients to Lightning's optimization loop, and signals, while they are computed, that this worker
is ready: only its own computation can still delay its update.

On this signal the scheduler lets others wait for this worker (SDPipe §4, "Worker Communication"). Most workers send it
before their last backward or, with few micro-batches, within it. But clipping by the norm of all stages, the vote on an
overflow in 16-bit mixed precision, and the sum over the owners of a shared parameter come after the backward and wait
for other stages of the pipeline, which may be late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lightning_sdpipe import meter
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity.injector import DelayInjector

_ROUNDING = 1e-5  # a factor this close to 1 may be a rounding error


def set_aside(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Take the gradients off the parameters and return them."""
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return gradients


def put_back(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Undo :func:`set_aside`."""
    for p, grad in zip(parameters, gradients, strict=True):
        p.grad = grad


class reported_to:
    """Within the context, ``exchange`` is told of the gradient of each of these parameters as soon as a backward has
    added to it."""

    def __init__(self, exchange: GradientExchange, parameters: Sequence[nn.Parameter], numbers: Iterable[int]) -> None:
        self._exchange, self._parameters, self._numbers = exchange, parameters, numbers

    def __enter__(self) -> None:
        parameters, report = self._parameters, self._report
        self._hooks = [
            parameters[n].register_post_accumulate_grad_hook(partial(report, n))  # type: ignore[no-untyped-call]
            for n in self._numbers
        ]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _report(self, number: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._exchange.gradient_ready(number, parameter.grad)


def hooked(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the ``parameters`` that have user hooks on their gradients."""
    return [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]


def refuse_hooks(parameters: Iterable[nn.Parameter], schedule: str, why: str) -> None:
    """Raise ConfigurationError if the user has registered hooks on gradients that ``schedule`` would not call."""
    if hooked(parameters):
        raise ConfigurationError(
            f"A parameter has a hook on its gradient, and schedule={schedule!r} {why}. Use another schedule, or change "
            "the gradient in on_before_optimizer_step."
        )


def loss_with_gradients(
    loss: Tensor,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor | None],
    scale: Tensor | None = None,
    exchange: GradientExchange | None = None,
    accumulated: bool = False,
    share: float = 1.0,
) -> Tensor:
    """Return the loss as a tensor whose ``backward`` multiplies ``gradients`` by the gradient that it gets, and adds
    them to ``parameters``.

    Lightning zeroes gradients between ``training_step``, where a pipeline computes them, and ``backward``. This way
    gradient accumulation, loss scaling and users' own ``backward`` hooks work as they do without a pipeline.

    Args:
        loss: a scalar, multiplied by ``scale``, as ``gradients`` are.
        parameters: the parameters.
        gradients: their gradients, in the same order.
        scale: a loss scale, divided out of the loss here and of the gradients in the backward.
        exchange: replaces ``gradients``, some of which it may have already, before they are added.
        accumulated: whether earlier mini-batches have left gradients for the same update. Then ``gradients`` are added
            first, and the exchange replaces the sums.
        share: the mini-batch's share of its update, by which ``gradients`` are multiplied, but not ``loss``. It is
            divided out in the backward.
    """
    deposit: Any = _Deposit.apply  # untyped in torch
    loss = loss.detach() if scale is None else loss.detach() / scale
    if exchange is not None and not accumulated:
        exchange.complete(gradients)
    left = _Left(list(parameters), list(gradients), scale, exchange, accumulated, share, meter.current())
    return deposit(_anchor(loss.device), loss, left)  # type: ignore[no-any-return]


@cache
def _anchor(device: torch.device) -> Tensor:
    """Return a tensor that requires a gradient and never gets one."""
    return torch.zeros((), device=device, requires_grad=True)


@dataclass
class _Left:
    """The gradients of a mini-batch until its backward; see :func:`loss_with_gradients`."""

    parameters: Sequence[nn.Parameter]
    gradients: Sequence[Tensor | None]
    scale: Tensor | None
    exchange: GradientExchange | None
    accumulated: bool
    share: float
    meter: meter.Meter
    """Meter of the thread that waits for the backward, which may run in another thread."""


class _Deposit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, left: _Left) -> Tensor:
        ctx.left = left
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        left: _Left | None = ctx.left
        if left is None:
            raise ConfigurationError(
                "backward ran twice on the loss of one mini-batch, whose gradients the pipeline has computed once. Run "
                "it once, on the sum of what you would have run it on."
            )
        ctx.left = None
        gradients, exchange = left.gradients, left.exchange
        if exchange is not None and not left.accumulated:
            with left.meter.spans[meter.EXCHANGE]:
                gradients = exchange.finish()
        present = [grad for grad in gradients if grad is not None]
        factor = grad_output if left.scale is None else grad_output / left.scale
        factor = factor if left.share == 1.0 else factor / left.share
        # reading the factor would wait for a GPU; on a CPU it saves a pass over the gradients
        if present and (factor.device.type != "cpu" or factor.item() != 1.0):
            if hooked(left.parameters) and abs(float(factor) - 1) > _ROUNDING:
                raise ConfigurationError(
                    f"The loss was multiplied by {float(factor):g} after training_step had returned it, when hooks on "
                    "gradients had already seen those of the loss itself. Multiply it in training_step, or change the "
                    "gradient in on_before_optimizer_step."
                )
            torch._foreach_mul_(present, factor)
        for p, grad in zip(left.parameters, gradients, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad.add_(grad)
        if exchange is not None and left.accumulated:
            exchange.complete([p.grad for p in left.parameters])
            with left.meter.spans[meter.EXCHANGE]:
                put_back(left.parameters, exchange.finish())
        return None, None, None


LastWait = Literal["backward", "vote", "norm", "step"]
"""The points that an update passes, in order; as a setting, the last at which it may wait for another stage."""


class ReadySignal:
    """Fires once in each update, when it passes the last point that waits for another stage, and at the latest after
    the optimizer's step. The pipeline, clipping and the loss scale report the points that they pass.

    Args:
        last: the last point that waits for another stage.
        fire: announces that this worker is ready.
    """

    def __init__(self, last: LastWait = "backward", fire: Callable[[], None] = lambda: None) -> None:
        self._last = last
        self._fire = fire
        self._expected = False
        self._share = 0.0
        self._parameter: Tensor | None = None
        self._in_last_backward = False

    def expect(self) -> None:
        """Begin an update, in which the signal must fire."""
        self._expected = True

    def drop(self) -> None:
        """End the update, whether or not the signal has fired."""
        self._expected = False

    def passed(self, point: LastWait) -> None:
        """Fire if ``point`` is the last that waits for another stage."""
        if self._expected and point in (self._last, "step"):
            self._expected = False
            self._fire()

    # ---------------------------------------------------------- within backwards

    def begin(self, share: float, parameters: Sequence[Tensor]) -> None:
        """Begin the backwards of a mini-batch.

        Args:
            share: the share of its gradients, from 0 to 1, after which the last backward counts as passed; 0 if it does
                before it begins.
            parameters: parameters whose gradients are computed, from the first layer to the last.
        """
        self._share, self._in_last_backward = share, False
        self._parameter = parameters[int(len(parameters) * (1.0 - share))] if share and parameters else None

    def last_backward(self) -> None:
        """Mark the next backward as the last of its mini-batch."""
        self._in_last_backward = True
        if not self._share:
            self.passed("backward")

    def computing(self, delays: DelayInjector) -> AbstractContextManager[None]:
        """Return the context for a backward; ``delays`` slow this worker down, if asked to."""
        last = self._expected and self._in_last_backward and self._last == "backward"
        parameter = self._parameter
        if not (delays.injects or delays.measures):
            computing: AbstractContextManager[None] = meter.phase(meter.BACKWARD)
        elif last:
            computing = delays.computing(self._share, self._pass_backward)
            parameter = None if delays.slows else parameter
        else:
            computing = delays.computing()
        return self._hearing(parameter, computing) if last else computing

    @contextmanager
    def _hearing(self, parameter: Tensor | None, computing: AbstractContextManager[None]) -> Iterator[None]:
        """Pass the backward when ``parameter`` has its gradient, and at the latest when all have."""
        hook = None
        if parameter is not None and parameter.requires_grad:
            hook = parameter.register_hook(self._pass_backward)  # type: ignore[no-untyped-call]
        try:
            with computing:
                yield
        finally:
            if hook is not None:
                hook.remove()
        self._pass_backward()

    def _pass_backward(self, *_: Tensor) -> None:
        self.passed("backward")


class GradientExchange(Protocol):
    """Replaces the gradients of an update by others, such as their means over replicas.

    A parameter's number is its position in the sequence with which the pipeline and the exchange were both made.
    """

    @property
    def early(self) -> Collection[int]:
        """Numbers of the parameters whose gradients the exchange can use before the backward ends."""

    def gradient_ready(self, number: int, gradient: Tensor) -> None:
        """Take the final gradient of parameter ``number``, one of :attr:`early`, while the backward goes on. Read it
        now, since the tensor may change afterwards."""

    def complete(self, gradients: Sequence[Tensor | None]) -> None:
        """End the backward: take all gradients, including those that :meth:`gradient_ready` got. Do not wait."""

    def finish(self) -> list[Tensor | None]:
        """Wait for the gradients that replace those given to :meth:`complete`, and return them."""
