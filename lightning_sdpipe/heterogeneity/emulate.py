"""Emulated compute: blocks that take a given time without using the processor.

Sixteen workers cannot compute at once on two cores, but they can sleep at once. Synchronisation, communication and the
optimizer stay real. Measurements with these blocks must be labelled *emulated*.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import check_integer, check_number

# Largest delay of an awakening for which the next sleep may make up. Linux timers wake 0.1 to 0.3 ms late; a longer
# delay is contention, for which an emulated device would not make up either.
_MAX_CARRY_SECONDS = 1e-3


class Pacer:
    """Sleeps until deadlines; the delay of one awakening, up to 1 ms, is taken off the next sleep.

    Args:
        clock: returns monotonic seconds.
        sleep: waits for the given seconds, or a little longer.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.clock = clock
        self._sleep = sleep
        self._late = 0.0

    def sleep_until(self, deadline: float) -> None:
        """Return at `deadline` (on this clock), or at once if it has passed."""
        target = deadline - self._late
        remaining = target - self.clock()
        if remaining > 0.0:
            self._sleep(remaining)
        self._late = min(max(self.clock() - target, 0.0), _MAX_CARRY_SECONDS)


class EmulatedBlock(nn.Module):
    """A block whose forward and backward sleep for a given time.

    Its output depends on its input and on its parameter, and both receive gradients, so that pipelines, optimizers and
    averaging do their real work. On the meta device it does not sleep.

    Args:
        forward_seconds: length of one forward, whatever the batch size.
        backward_seconds: length of one backward, whatever the batch size.
        out_shape: shape of one sample's output, without the batch dimension; None for the input's own shape.
        num_parameters: elements of the parameter `weight`, at least 1.

    Raises:
        ConfigurationError: a time is negative or infinite, or a shape or parameter is empty.
    """

    def __init__(
        self,
        forward_seconds: float,
        backward_seconds: float,
        *,
        out_shape: tuple[int, ...] | None = None,
        num_parameters: int = 1024,
    ) -> None:
        super().__init__()
        times = {"forward_seconds": forward_seconds, "backward_seconds": backward_seconds}
        for name, value in times.items():
            check_number(name, value, "finite seconds from 0", least=0, below=math.inf)
        check_integer("num_parameters", num_parameters, 1, "elements")
        for size in out_shape or ():
            check_integer("out_shape", size, 1, "in each dimension")
        self.forward_seconds = forward_seconds
        self.backward_seconds = backward_seconds
        self.out_shape = None if out_shape is None else tuple(out_shape)
        self.weight = nn.Parameter(torch.zeros(num_parameters))
        self.pacer = Pacer()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, …) of any type to (batch, *out_shape) of the weight's type."""
        start = self.pacer.clock()
        values = x.to(self.weight.dtype)
        if self.out_shape is not None:
            per_sample = values.flatten(1).mean(1) if values.dim() > 1 else values
            values = per_sample.view(-1, *[1] * len(self.out_shape)).expand(-1, *self.out_shape)
        # The backward sleeps first and then computes the gradients, so no stage gets them early.
        output: Tensor = _Sleep.apply(values + self.weight.mean(), self, start)  # type: ignore[no-untyped-call]
        return output

    def extra_repr(self) -> str:
        """Return the times and shape, for `print(model)`."""
        return (
            f"forward_seconds={self.forward_seconds}, backward_seconds={self.backward_seconds}, "
            f"out_shape={self.out_shape}, num_parameters={self.weight.numel()}"
        )


class _Sleep(torch.autograd.Function):
    """The identity, delayed by the block's times in both directions."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, block: EmulatedBlock, start: float) -> Tensor:
        ctx.block = block
        if values.device.type != "meta":
            block.pacer.sleep_until(start + block.forward_seconds)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        block: EmulatedBlock = ctx.block
        if grad.device.type != "meta":
            block.pacer.sleep_until(block.pacer.clock() + block.backward_seconds)
        return grad, None, None
