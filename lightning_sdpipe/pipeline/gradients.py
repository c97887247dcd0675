"""Handing the gradients of a pipeline schedule to Lightning's optimization loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sdpipe import meter
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.gradients import GradientExchange as GradientExchange


def set_aside(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Takes the gradients off the parameters and returns them."""
    gradients = [p.grad for p in parameters]
    put_back(parameters, [None] * len(gradients))
    return gradients


def put_back(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Undoes :func:`set_aside`."""
    for p, grad in zip(parameters, gradients, strict=True):
        p.grad = grad


class reported_to:
    """Within the context, ``exchange`` is told of each of these parameters as soon as a backward has added to its
    gradient."""

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


def has_hooks(parameter: nn.Parameter) -> bool:
    """Returns whether the user has registered hooks on the gradient of ``parameter``."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def loss_with_gradients(
    loss: Tensor,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor | None],
    scale: Tensor | None = None,
    exchange: GradientExchange | None = None,
    accumulated: bool = False,
) -> Tensor:
    """Returns the loss as a tensor whose ``backward`` adds ``gradients``, times the gradient it is given, to
    ``parameters``.

    Lightning zeroes gradients between ``training_step``, where a pipeline computes them, and ``backward``. This way
    gradient accumulation, loss scaling and users' own ``backward`` hooks work as they do without a pipeline.

    Args:
        loss: a scalar; multiplied by ``scale``, as ``gradients`` are.
        parameters: the parameters of the gradients.
        gradients: in the order of the parameters.
        scale: a loss scale, divided out again of the loss here and of the gradients in the backward.
        exchange: the exchange that replaces ``gradients``, of which it may have some already, before they are added.
        accumulated: whether earlier mini-batches have left gradients for the same update. Then ``gradients`` are added
            first, and the exchange replaces the sums.
    """
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    deposit: Any = _Deposit.apply  # untyped in torch
    loss = loss.detach() if scale is None else loss.detach() / scale
    if exchange is not None and not accumulated:
        exchange.complete(gradients)
    return deposit(anchor, loss, list(parameters), list(gradients), scale, exchange, accumulated)  # type: ignore[no-any-return]


class _Deposit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        loss: Tensor,
        parameters: list[nn.Parameter],
        gradients: list[Tensor | None],
        scale: Tensor | None,
        exchange: GradientExchange | None,
        accumulated: bool,
    ) -> Tensor:
        ctx.parameters, ctx.gradients, ctx.scale = parameters, gradients, scale
        ctx.exchange, ctx.accumulated, ctx.done = exchange, accumulated, False
        ctx.meter = meter.current()  # of the thread that will wait for the backward, which may run in another one
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.done:
            raise ConfigurationError(
                "backward ran twice on the loss of one mini-batch, whose gradients the pipeline has computed once. Run "
                "it once, on the sum of what you would have run it on."
            )
        ctx.done = True
        if ctx.exchange is not None and not ctx.accumulated:
            with ctx.meter.spans[meter.EXCHANGE]:
                ctx.gradients = ctx.exchange.finish()
        present = [grad for grad in ctx.gradients if grad is not None]
        factor = grad_output if ctx.scale is None else grad_output / ctx.scale
        # reading the factor would wait for a GPU; on a CPU it saves a pass over the gradients
        if present and (factor.device.type != "cpu" or factor.item() != 1.0):
            torch._foreach_mul_(present, factor)
        for p, grad in zip(ctx.parameters, ctx.gradients, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad.add_(grad)
        if ctx.exchange is not None and ctx.accumulated:
            ctx.exchange.complete([p.grad for p in ctx.parameters])
            with ctx.meter.spans[meter.EXCHANGE]:
                put_back(ctx.parameters, ctx.exchange.finish())
        ctx.gradients = ctx.parameters = ()
        return None, None, None, None, None, None, None
