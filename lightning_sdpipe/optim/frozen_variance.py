"""Adam that first measures its second moment and then freezes it, for gradients that arrive with few bits."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from lightning_sdpipe.errors import ConfigurationError, check_integer, check_number
from lightning_sdpipe.optim.wrapper import OptimizerWrapper

# Entries that the wrapper adds to a parameter's optimizer state.
_MEASURED = "variance_steps"
"""Number of gradients in the second moment."""
_SINCE = "frozen_steps"
"""Number of gradients since it was frozen."""

_BUCKET_ELEMENTS = 1 << 20  # elements updated at a time, since their denominators take memory


class FrozenVariance(OptimizerWrapper):
    """Freezes Adam's second moment of each parameter after ``after`` of its gradients (1-bit Adam, Tang et al. 2021).

    Until then, every parameter and moment is bit-equal to the wrapped optimizer's. From then on, the step divides by
    the frozen second moment, with *its* bias correction frozen, too; the first moment and its bias correction, weight
    decay and the learning rate continue. So the squares of gradients of a few bits, which mean nothing, do no harm.

    A value that has had hardly any gradient so far has a tiny second moment. Once that is frozen, its next gradient, or
    a compression error (which is equally large for all values of a block), would throw it far away. So frozen second
    moments are raised to at least `floor` times the mean of their tensor, and a tensor whose gradients were all zero is
    no longer updated. The published algorithm is `floor=0`.

    It shares `param_groups` and `state` with the wrapped optimizer, as
    :class:`~lightning_sdpipe.optim.VarianceCorrection` does. A second moment that is frozen in a checkpoint stays
    frozen, even with a larger `after`. In a checkpoint of the bare optimizer, all gradients count.

    Memory: no tensor beside Adam's; during a step, one of the size of the largest parameter.

    Args:
        optimizer: torch's Adam or AdamW; any of for-loop, foreach and fused until the variance is frozen, foreach from
            then on; amsgrad, maximize and both kinds of weight decay are respected.
        after: number of gradients in the second moment, at least 1: the payload's `after`, and enough for the second
            moment to settle, which takes at least the learning rate's warm-up.
        floor: from 0 to 1.

    Raises:
        ConfigurationError: the optimizer is of another kind, or has `capturable` or `differentiable` set; a parameter
            is complex; `after` is below 1; or `floor` is not in [0, 1].
    """

    _kept = ("after", "floor")

    def __init__(self, optimizer: Optimizer, after: int, floor: float = 0.01) -> None:
        if not isinstance(optimizer, Adam):
            raise ConfigurationError(
                f"FrozenVariance freezes Adam and AdamW of torch.optim, not {type(optimizer).__name__}: use one of "
                "these, without VarianceCorrection, which has nothing to correct in a frozen variance."
            )
        check_integer("after", after, 1, "gradients to measure the variance by")
        check_number("floor", floor, "a share of the mean second moment, such as 0.01", least=0, most=1)
        self.after = after
        self.floor = floor
        super().__init__(optimizer)

    def _step(self) -> None:
        """Step unfrozen parameters with the wrapped optimizer, and the others here."""
        frozen = [(group, [p for p in self._trained(group) if self._is_frozen(p)]) for group in self.param_groups]
        gradients = {param: param.grad for _, params in frozen for param in params}
        measured = [p for group in self.param_groups for p in self._trained(group) if p not in gradients]
        try:
            for param in gradients:
                param.grad = None
            self.optimizer.step()
        finally:
            for param, gradient in gradients.items():
                param.grad = gradient
        for param in measured:
            state = self.state[param]
            state.update({_MEASURED: state.get(_MEASURED, 0) + 1, _SINCE: 0})
        for group, params in frozen:
            self._step_frozen(group, params)

    def _is_frozen(self, param: Tensor) -> bool:
        state = self.state.get(param)
        if not state:
            return False
        if _MEASURED not in state:  # a checkpoint of the bare optimizer
            state.update({_MEASURED: int(state["step"]), _SINCE: 0})
        return bool(state[_SINCE] or state[_MEASURED] >= self.after)

    def _step_frozen(self, group: dict[str, Any], params: list[Tensor]) -> None:
        alike: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for param in params:
            state = self.state[param]
            if not state[_SINCE] and self.floor:
                _raise_to(self.floor, state)
            state["step"] += 1
            state[_SINCE] += 1
            alike[param.device, param.dtype, state[_MEASURED], state[_SINCE]].append(param)
        for (_, _, measured, since), kin in alike.items():
            for bucket in _buckets(kin):
                self._update(group, bucket, measured, measured + since)

    def _update(self, group: dict[str, Any], params: list[Tensor], measured: int, step: int) -> None:
        """Perform Adam's step without updating the second moment."""
        lr, (beta1, beta2), decay = float(group["lr"]), map(float, group["betas"]), float(group["weight_decay"])
        states = [self.state[param] for param in params]
        grads: list[Tensor] | tuple[Tensor, ...] = [param.grad for param in params if param.grad is not None]
        if group["maximize"]:
            grads = torch._foreach_neg(grads)
        if decay and group["decoupled_weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            grads = torch._foreach_add(grads, params, alpha=decay)
        firsts = [state["exp_avg"] for state in states]
        torch._foreach_lerp_(firsts, grads, 1 - beta1)
        divisors = torch._foreach_sqrt(
            [state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"] for state in states]
        )
        torch._foreach_div_(divisors, (1 - beta2**measured) ** 0.5)
        torch._foreach_add_(divisors, group["eps"])
        torch._foreach_addcdiv_(params, firsts, divisors, -lr / (1 - beta1**step))

    def _check(self, group: dict[str, Any]) -> None:
        self._refuse_options(group, "it stops calling it")
        for param in group["params"]:
            if param.is_complex():
                raise ConfigurationError(
                    f"FrozenVariance needs real parameters, not {param.dtype}: optimize torch.view_as_real of them."
                )


def _raise_to(floor: float, state: dict[str, Any]) -> None:
    for key in ("exp_avg_sq", "max_exp_avg_sq"):
        if key in state:
            mean = state[key].mean()
            least = torch.where(mean > 0, floor * mean, torch.inf)  # values divided by infinity do not move
            torch.maximum(state[key], least.to(mean.dtype), out=state[key])


def _buckets(params: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for param in params:
        if bucket and size + param.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket.append(param)
        size += param.numel()
    yield bucket
