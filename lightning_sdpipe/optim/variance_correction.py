"""Adam for workers whose models are averaged (SDPipe §4, "Optimizer Variance Reduction").

With b = beta2 and c = 1 − b^t, Adam's second moment after t gradients is v = b·v₋ + (1 − b)·g² (a minus marks values
before this gradient). The gradient's mean has the same decay, and is bias-corrected: m = m̃ / c. The part of v that
comes from the gradient's variance is V = v − c·m², and Adam should divide by u = c·m² + V / n (SDPipe §4).

V obeys V = b·V₋ + (1 − b)·(b·c₋/c)·d² with d = g − m₋, a sum of squares. Since u = v − (1 − 1/n)·V, it follows that

    u = b·[u₋ − (1 − 1/n)·(1 − b)·(c₋/c)·d²] + (1 − b)·g²

which has the form of Adam's own update. So u itself can live where Adam keeps v: the bracket is computed before the
wrapped optimizer's step, and the step does the rest. u ≥ v/n > 0 at all times, without clamping.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam, NAdam, Optimizer, RAdam

from lightning_sdpipe.errors import ConfigurationError, check_number
from lightning_sdpipe.optim.wrapper import OptimizerWrapper

# Elements handled at a time, so that every operation on a bucket finds its data in the cache. With smaller buckets,
# launching the operations would cost more than the cache saves.
_BUCKET_ELEMENTS = 1 << 20
_Bucket = tuple[list[Tensor], list[Tensor], list[Tensor]]
_ADAM_FAMILY = (Adam, NAdam, RAdam)  # AdamW is an Adam
# Entries that the wrapper adds to a parameter's optimizer state.
_MEAN = "grad_mean"
_STEPS = "grad_mean_steps"
_WORKERS = "num_workers"


class MomentTensors(NamedTuple):
    """Tensors of one parameter, all of its shape; the last two have the same memory layout."""

    param: Tensor
    grad: Tensor
    mean: Tensor
    """Bias-corrected mean m of the gradient."""
    second_moment: Tensor
    """Second moment u, kept where the wrapped optimizer keeps v."""


def _advance(
    tracks: list[MomentTensors], beta2: float, step: int, workers: float, workers_before: float, grad_decay: float
) -> None:
    """Advance means and second moments by this step's gradients, up to the part that the wrapped step adds.

    Afterwards `mean` is current, and `second_moment` is the bracket in the module's formula: the wrapped optimizer's
    own update turns it into u. With one worker, before and now, `second_moment` is not touched.

    Args:
        tracks: tensors of one dtype on one device.
        beta2: decay of the second moment, in [0, 1).
        step: number of gradients seen, including this one; at least 2 (the first gradient only initialises the mean).
        workers: n of this step, at least 1.
        workers_before: n with which the stored second moment was computed, at least 1.
        grad_decay: weight decay that the wrapped optimizer adds to the gradient (0 when decoupled).
    """
    rescale = workers_before / workers  # factor of V/n, which converts u from the former n to this step's
    bias_before = 1.0 - beta2 ** (step - 1)  # c₋, the weight of the earlier gradients in v
    mean_rate = (1.0 - beta2) / (1.0 - beta2**step)  # the rate at which the mean moves towards this gradient
    deviation_weight = (1.0 - 1.0 / workers) * mean_rate * bias_before  # the weight of d² in the bracket
    size = min(_BUCKET_ELEMENTS, sum(track.mean.numel() for track in tracks))
    scratch = tracks[0].mean.new_empty(size)  # shared by all buckets: fresh memory costs as much as using it
    for grads, means, seconds in _buckets(tracks, grad_decay):
        if rescale != 1.0:
            torch._foreach_mul_(seconds, rescale)
            torch._foreach_addcmul_(seconds, means, means, (1.0 - rescale) * bias_before)
        if workers == 1.0:
            torch._foreach_lerp_(means, grads, mean_rate)
            continue
        sizes = [mean.numel() for mean in means]
        deviations = list(scratch[: sum(sizes)].split_with_sizes(sizes))
        _step_towards(means, grads, mean_rate, deviations)
        torch._foreach_addcmul_(seconds, deviations, deviations, -deviation_weight)


def _step_towards(means: list[Tensor], grads: list[Tensor], rate: float, deviations: list[Tensor]) -> None:
    """Write grads − means to `deviations` and add `rate` times that to the means, in one pass over memory.

    An SGD step on the means does exactly this: a weight decay of −1 turns its gradient into the difference, which the
    momentum buffer takes unchanged at its first step.
    """
    torch._fused_sgd_(
        means,
        grads,
        deviations,
        weight_decay=-1.0,
        momentum=0.5,  # any value except zero, so that the buffer is written
        lr=-rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )


def _buckets(tracks: list[MomentTensors], grad_decay: float) -> Iterator[_Bucket]:
    """Yield flat gradients, means and second moments in buckets that fit into the cache."""
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


def is_adam_family(optimizer: Optimizer) -> bool:
    """Return whether `VarianceCorrection` applies to this optimizer: torch's Adam, AdamW, NAdam or RAdam."""
    return isinstance(optimizer, _ADAM_FAMILY)


class VarianceCorrection(OptimizerWrapper):
    """Makes an Adam-family optimizer divide by the second moment of the *joint* gradient of n workers.

    A worker sees only its own gradients, whose variance is n times that of the gradient averaged over n workers; once
    the models are averaged, its second moment is too large by variance × (1 − 1/n). The wrapper keeps the mean m of the
    gradient with the second moment's decay beta2 and replaces v by m² + (v − m²)/n, every term bias-corrected (SDPipe
    §4). The theory is at the top of this module, the remaining error in docs/variance_correction.md.

    It shares `param_groups` and `state` with the wrapped optimizer, so learning-rate schedulers, hooks, `state_dict`
    and `GradScaler` treat it as that optimizer. With one worker, every parameter and moment is bit-equal to the wrapped
    optimizer's. A checkpoint of the bare optimizer can be loaded; the mean then starts from its first moment.

    Memory: one tensor of each parameter's size and type, beside Adam's two (three with amsgrad).

    Args:
        optimizer: torch's Adam, AdamW, NAdam or RAdam; any of for-loop, foreach and fused; amsgrad, maximize and both
            kinds of weight decay are respected.
        num_workers: n, the number of all workers whose models are averaged, however small the groups. At least 1, not
            necessarily an integer. You may set the attribute between steps.

    Raises:
        ConfigurationError: the optimizer is of another kind, or has `capturable` or `differentiable` set; a parameter
            is complex or has less than 32 bits; or `num_workers` is below 1 or not finite.
    """

    _kept = ("_num_workers",)

    def __init__(self, optimizer: Optimizer, num_workers: float = 1) -> None:
        if not is_adam_family(optimizer):
            raise ConfigurationError(
                f"VarianceCorrection corrects Adam, AdamW, NAdam and RAdam of torch.optim, not "
                f"{type(optimizer).__name__}: use one of these, or leave the correction out."
            )
        self.num_workers = num_workers
        super().__init__(optimizer)

    @property
    def num_workers(self) -> float:
        """Number n of workers whose models are averaged; a new value counts from the next step on."""
        return self._num_workers

    @num_workers.setter
    def num_workers(self, value: float) -> None:
        check_number("num_workers", value, "a finite number from 1", least=1, below=math.inf)
        self._num_workers = float(value)

    def _step(self) -> None:
        """Perform the wrapped optimizer's step with corrected second moments."""
        started: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            started.update(self._correct(group))
        self.optimizer.step()
        # Only after the step, since the wrapped optimizer initialises a parameter's state only if it is empty.
        for param, mean in started.items():
            self.state[param].update({_MEAN: mean, _STEPS: 1, _WORKERS: self.num_workers})

    def _correct(self, group: dict[str, Any]) -> dict[Tensor, Tensor]:
        """Prepare one group's second moments; return the means of parameters whose first gradient this is."""
        grad_decay = _decay_in_gradient(group)
        started: dict[Tensor, Tensor] = {}
        alike: defaultdict[tuple[torch.device, torch.dtype, int, float], list[MomentTensors]] = defaultdict(list)
        for param in self._trained(group):
            grad = param.grad
            assert grad is not None
            if not self.state.get(param):
                # The variance of a single gradient is zero, which leaves the second moment as it is.
                started[param] = torch.empty_like(param).copy_(grad).add_(param, alpha=grad_decay)
                continue
            state = self.state[param]
            if _MEAN not in state:
                state.update(_adopt(state, group))
            state[_STEPS] += 1
            kind = (param.device, param.dtype, state[_STEPS], state[_WORKERS])
            alike[kind].append(MomentTensors(param, grad, state[_MEAN], state["exp_avg_sq"]))
            state[_WORKERS] = self.num_workers
        beta2 = float(group["betas"][1])
        for (_, _, step, workers_before), tracks in alike.items():
            _advance(tracks, beta2, step, self.num_workers, workers_before, grad_decay)
        return started

    def _check(self, group: dict[str, Any]) -> None:
        self._refuse_options(group, "its factors change at every step outside of the graph")
        for param in group["params"]:
            if not param.is_floating_point() or param.dtype.itemsize < 4:
                raise ConfigurationError(
                    f"VarianceCorrection needs parameters in float32 or float64, not {param.dtype}, "
                    f"whose moments cannot resolve the decay of beta2: use mixed precision "
                    f"(precision='bf16-mixed') instead."
                )


def _decay_in_gradient(group: dict[str, Any]) -> float:
    """Return the weight decay that enters the moments; negative with maximize, where the mean has the other sign."""
    if group.get("decoupled_weight_decay", False):
        return 0.0
    return float(-group["weight_decay"] if group["maximize"] else group["weight_decay"])


def _adopt(state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Return this wrapper's part of the state of a parameter that the wrapped optimizer has already stepped alone.

    The mean of its past gradients is unknown; the first moment is the best estimate.
    """
    steps = int(state["step"])
    mean = state["exp_avg"] / (1.0 - float(group["betas"][0]) ** steps)
    return {_MEAN: -mean if group["maximize"] else mean, _STEPS: steps, _WORKERS: 1.0}
