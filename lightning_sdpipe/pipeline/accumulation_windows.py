"""Accumulation windows of a pipeline without a flush: the mini-batches of an update, and the turn that applies it.

A stage counts turns, one for each forward. A *window* is the mini-batches between two optimizer steps: one, unless
gradients are accumulated. It closes at the turn of its last mini-batch. Each optimizer step applies one window, the
oldest that is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Window:
    """One worker's part of an accumulation window.

    Args:
        generation: the number of the present choice of trained layers.
    """

    generation: int
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # the sums so far, unscaled
    loss_scale: float = 0.0  # the largest loss scale of its mini-batches
    closed_at: int = -1

    def add(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        loss_scale: float,
        in_use: Iterable[Tensor | None],
    ) -> None:
        """Add the gradients of a mini-batch, which may share memory with each other and with tensors that are
        ``in_use``."""
        self.loss_scale = max(self.loss_scale, loss_scale)
        present = {p: grad for p, grad in zip(parameters, gradients, strict=True) if grad is not None}
        if loss_scale != 1.0 and present:
            present = dict(zip(present, torch._foreach_div(list(present.values()), loss_scale), strict=True))
        taken = {tensor.untyped_storage().data_ptr() for tensor in in_use if tensor is not None}
        for p, grad in present.items():
            if p in self.gradients:
                self.gradients[p].add_(grad)
            else:
                memory = 0 if grad.is_sparse else grad.untyped_storage().data_ptr()
                own = grad.is_sparse or (memory not in taken and 0 not in grad.stride())  # 0: expanded
                self.gradients[p] = grad if own else grad.clone(memory_format=torch.contiguous_format)
                taken.add(memory)


@dataclass(eq=False)
class Lane:
    """Parameters whose gradients come equally late.

    Args:
        depth: turns from the forward of a mini-batch until all stages that hold the parameters have run its backward.
    """

    depth: int
    waiting: deque[Window] = field(default_factory=deque)  # closed windows, the oldest first

    def due(self, turn: int) -> bool:
        """Return whether an optimizer step at ``turn`` applies a window."""
        return bool(self.waiting) and self.waiting[0].closed_at + self.depth <= turn

    def would_be_due(self, turn: int) -> bool:
        """Return whether an optimizer step at ``turn`` applies a window if one closes at that turn."""
        return self.due(turn) if self.waiting else self.depth == 0
