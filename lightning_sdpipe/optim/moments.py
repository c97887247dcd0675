"""Arithmetic of the variance correction, on lists of tensors.

With b = beta2 and c = 1 − b^t, Adam's second moment after t gradients is v = b·v + (1 − b)·g². Beside it runs the
gradient's mean with the same decay, bias-corrected: m = m̃ / c. The part of v that comes from the gradient's variance
is V = v − c·m², and Adam is to divide by u = c·m² + V / n (SDPipe §4).

V obeys V ← b·V + (1 − b)·(b·c₋/c)·d² with d = g − m₋ (a minus marks values before this gradient), a sum of
squares. Since u = v − (1 − 1/n)·V, it follows that

    u ← b·[u₋ − (1 − 1/n)·(1 − b)·(c₋/c)·d²] + (1 − b)·g²

whose outer form is Adam's own update. So u itself can live where Adam keeps v: the bracket is applied before
the wrapped optimizer's step, and the step does the rest. u ≥ v/n > 0 at all times, with no clamping.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Elements handled at a time, so that every operation on a bucket finds its data in the cache. In smaller buckets,
# starting the operations costs more than the cache saves.
_BUCKET_ELEMENTS = 1 << 20


class MomentTensors(NamedTuple):
    """Tensors of one parameter, all of its shape; the last two have the same memory layout."""

    param: Tensor
    grad: Tensor
    mean: Tensor
    """Bias-corrected mean m of the gradient."""
    second_moment: Tensor
    """Second moment u, kept where the wrapped optimizer keeps v."""


@dataclass(frozen=True)
class Coefficients:
    """Scalars of one update; equal for all parameters that have seen equally many gradients.

    Args:
        beta2: decay of the second moment, in [0, 1).
        step: number of gradients seen, including this one; at least 2 (the first gradient only initialises the mean).
        workers: n of this step, at least 1.
        workers_before: n that the stored second moment was computed with, at least 1.
        grad_decay: weight decay that the wrapped optimizer adds to the gradient (0 when decoupled).
    """

    beta2: float
    step: int
    workers: float
    workers_before: float
    grad_decay: float

    @property
    def rescale(self) -> float:
        """Factor on V/n that takes u from the former n to this step's."""
        return self.workers_before / self.workers

    @property
    def bias_before(self) -> float:
        """Weight c₋ of the earlier gradients in v."""
        return 1.0 - self.beta2 ** (self.step - 1)

    @property
    def mean_rate(self) -> float:
        """Rate at which the mean moves towards this gradient."""
        return (1.0 - self.beta2) / (1.0 - self.beta2**self.step)

    @property
    def deviation_weight(self) -> float:
        """Factor on d² in the bracket of the module's formula."""
        return (1.0 - 1.0 / self.workers) * self.mean_rate * self.bias_before


def advance(tracks: list[MomentTensors], by: Coefficients) -> None:
    """Move means and second moments over this step's gradients, up to the part that the wrapped step still adds.

    Afterwards `mean` is current, and `second_moment` is the bracket of the module's formula: the wrapped
    optimizer's own update turns it into u. With one worker, before and now, `second_moment` is not touched.

    Args:
        tracks: tensors of one dtype on one device.
        by: the scalars, the same for all of them.
    """
    size = min(_BUCKET_ELEMENTS, sum(track.mean.numel() for track in tracks))
    scratch = tracks[0].mean.new_empty(size)  # one for all buckets: fresh memory costs as much as using it
    for grads, means, seconds in _buckets(tracks, by.grad_decay):
        if by.rescale != 1.0:
            torch._foreach_mul_(seconds, by.rescale)
            torch._foreach_addcmul_(seconds, means, means, (1.0 - by.rescale) * by.bias_before)
        if by.workers == 1.0:
            torch._foreach_lerp_(means, grads, by.mean_rate)
            continue
        sizes = [mean.numel() for mean in means]
        deviations = list(scratch[: sum(sizes)].split_with_sizes(sizes))
        _step_towards(means, grads, by.mean_rate, deviations)
        torch._foreach_addcmul_(seconds, deviations, deviations, -by.deviation_weight)


def _step_towards(means: list[Tensor], grads: list[Tensor], rate: float, deviations: list[Tensor]) -> None:
    """Write grads − means to `deviations` and add `rate` times that to the means, in one pass over memory.

    An SGD step on the means is just this: a weight decay of −1 turns its gradient into the difference, which
    a momentum buffer at its first step takes as it is.
    """
    torch._fused_sgd_(
        means,
        grads,
        deviations,
        weight_decay=-1.0,
        momentum=0.5,  # any but zero, so that the buffer is written
        lr=-rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )


_Bucket = tuple[list[Tensor], list[Tensor], list[Tensor]]


def _buckets(tracks: list[MomentTensors], grad_decay: float) -> Iterator[_Bucket]:
    """Cut and pack (gradients, means, second moments), all flat, into buckets that fit into caches."""
    grads: list[Tensor] = []
    means: list[Tensor] = []
    seconds: list[Tensor] = []
    room = _BUCKET_ELEMENTS
    for track in tracks:
        grad, mean, second = _flat(track, grad_decay)
        if mean.numel() > room and means:
            yield grads, means, seconds
            grads, means, seconds, room = [], [], [], _BUCKET_ELEMENTS
        if mean.numel() > room:
            cut = (torch.split(tensor, room) for tensor in (grad, mean, second))
            for g, m, u in zip(*cut, strict=True):
                yield [g], [m], [u]
            continue
        grads.append(grad)
        means.append(mean)
        seconds.append(second)
        room -= mean.numel()
    if means:
        yield grads, means, seconds


def _flat(track: MomentTensors, grad_decay: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient that enters the moments, the mean and the second moment as 1-D tensors in memory order."""
    param, grad, mean, second = track
    if grad_decay != 0.0:
        grad = grad.add(param, alpha=grad_decay)
    if grad.is_contiguous() and mean.is_contiguous() and second.is_contiguous():
        return grad.view(-1), mean.view(-1), second.view(-1)
    if grad.stride() != mean.stride():
        grad = torch.empty_like(mean).copy_(grad)
    size = (mean.numel(),)
    return grad.as_strided(size, (1,)), mean.as_strided(size, (1,)), second.as_strided(size, (1,))
