"""Which mini-batches make up an update of a pipeline without a flush, and at which turn it is applied.

A stage counts turns, one for each forward. A *window* is the mini-batches between two steps of the optimizer: one,
unless gradients are accumulated. It is closed at the turn of its last mini-batch, and applied at the first turn with an
optimizer step at which it is complete, the oldest first, one at a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Window:
    """What one worker has of a window.

    Args:
        generation: of the choice of layers that train.
    """

    generation: int
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # their sums so far, without a loss scale
    loss_scale: float = 0.0  # the largest with which one of them was computed
    closed_at: int = -1

    def add(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        loss_scale: float,
        in_use: Iterable[Tensor | None],
    ) -> None:
        """Adds those of a mini-batch. They may be views of one memory, and share it with what is ``in_use``."""
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
    """Parameters that get their gradients equally late.

    Args:
        depth: how many turns after its forward the backward of a mini-batch is over on all stages that hold them.
    """

    depth: int
    waiting: deque[Window] = field(default_factory=deque)  # closed ones, the oldest first

    def due(self, turn: int) -> bool:
        """Is there one to apply, if the optimizer steps at ``turn``?"""
        return bool(self.waiting) and self.waiting[0].closed_at + self.depth <= turn

    def would_be_due(self, turn: int) -> bool:
        """The same, if a window is closed at ``turn``."""
        return self.due(turn) if self.waiting else self.depth == 0
