"""Running a step as two stages in one process, with what crosses the cut as leaves, as it arrives in a real
one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_sdpipe.partition.cut_step import Boundary, CutModel

CPU = torch.device("cpu")


def backward_in_two(model: nn.Module, chain: Sequence[str], at: int, step: Callable[[], Tensor]) -> Tensor:
    """The loss of ``step`` with a cut after the first ``at`` modules; gradients are left on the
    parameters."""
    first, second = range(at), range(at, len(chain))
    cut_model = CutModel(model, chain, [first, second], CPU)
    try:
        sent = cut_model.run(first, step, None)
        assert isinstance(sent, Boundary)
        arrived = [t.detach().clone().requires_grad_(t.requires_grad) for t in sent.tensors]
        loss: Tensor = cut_model.run(second, step, Boundary(arrived, sent.structures))
        if loss.requires_grad:
            loss.backward()
            crossing = [(t, a.grad) for t, a in zip(sent.tensors, arrived, strict=True) if a.grad is not None]
            torch.autograd.backward([t for t, _ in crossing], [g for _, g in crossing])
    finally:
        cut_model.restore()
    return loss.detach()
