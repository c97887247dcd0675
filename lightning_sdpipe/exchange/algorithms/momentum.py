"""Sending the momentum instead of the gradient (1-bit Adam, Tang et al. 2021).

Momentum changes slowly, so signs with error feedback follow it far better than they follow gradients. All workers hold
the same m̄. Each sends m = β m̄ + (1 − β) g; of their mean m̄' they make the gradient

    ĝ = (m̄' − β m̄) / (1 − β)

for an Adam with that β₁, whose ``exp_avg`` then becomes m̄' by itself. In full precision, ĝ is the mean gradient. Adam's
second moment would be one of ĝ, errors of compression included, so it must not change any more
(:class:`~lightning_sdpipe.optim.FrozenVariance`). Weight decay inside of gradients is Adam's own affair: it enters
``exp_avg`` after this.

m̄ takes as much memory as the gradients. It is in terms of gradients as they are sent: multiply it when a loss scale
changes, and keep the old one if m̄' is not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor


def momentum_to_send(momentum: Tensor, gradient: Tensor, beta: float) -> Tensor:
    """β m̄ + (1 − β) g, in a new tensor. Before compression begins, this with the mean gradient is the next m̄."""
    return torch.lerp(momentum, gradient.to(momentum.dtype), 1 - beta)


def gradient_to_apply(before: Tensor, after: Tensor, beta: float) -> Tensor:
    """ĝ of m̄ before and after this step, in a new tensor."""
    return (after - before).mul_(1 / (1 - beta)).add_(before)
