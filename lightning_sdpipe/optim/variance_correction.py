"""Adam for workers whose models are averaged (SDPipe §4, "Optimizer Variance Reduction")."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, NAdam, Optimizer, RAdam

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.optim.moments import Coefficients, MomentTensors, advance
from lightning_sdpipe.optim.wrapper import OptimizerWrapper

_ADAM_FAMILY = (Adam, NAdam, RAdam)  # AdamW is an Adam

# Entries that the wrapper adds to a parameter's optimizer state.
_MEAN = "grad_mean"
_STEPS = "grad_mean_steps"
_WORKERS = "num_workers"


def is_adam_family(optimizer: Optimizer) -> bool:
    """Return whether `VarianceCorrection` applies to this optimizer: torch's Adam, AdamW, NAdam or RAdam."""
    return isinstance(optimizer, _ADAM_FAMILY)


class VarianceCorrection(OptimizerWrapper):
    """Makes an Adam-family optimizer divide by the second moment of the *joint* gradient of n workers.

    A worker sees only its own gradients, whose variance is n times that of the gradient averaged over n workers; once
    the models are averaged, its second moment is too large by variance × (1 − 1/n). The wrapper keeps the mean m of the
    gradient with the second moment's decay beta2 and replaces v by m² + (v − m²)/n, every term bias-corrected (SDPipe
    §4). The theory is in `moments.py`, the remaining error in docs/variance_correction.md.

    It shares `param_groups` and `state` with the wrapped optimizer, so learning-rate schedulers, hooks,
    `state_dict` and `GradScaler` treat it as that optimizer. With one worker, every parameter and moment is
    bit-equal to the wrapped optimizer's. A checkpoint of the bare optimizer can be loaded; the mean then
    starts from its first moment.

    Memory: one tensor of each parameter's size and type, beside Adam's two (three with amsgrad).

    Args:
        optimizer: torch's Adam, AdamW, NAdam or RAdam; any of for-loop, foreach and fused; amsgrad, maximize
            and both kinds of weight decay are respected.
        num_workers: n, the number of all workers whose models are averaged, however small the groups are. At
            least 1, not necessarily whole. The attribute may be set between steps.

    Raises:
        ConfigurationError: the optimizer is of another kind; `capturable` or `differentiable` set; parameters that
            are complex or of less than 32 bits; `num_workers` below 1 or not finite.
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
        """Number n of workers whose models are averaged; used from the next step on."""
        return self._num_workers

    @num_workers.setter
    def num_workers(self, value: float) -> None:
        if not (math.isfinite(value) and value >= 1):
            raise ConfigurationError(f"num_workers={value!r} must be a finite number of at least 1.")
        self._num_workers = float(value)

    def corrected_second_moment(self, param: Tensor) -> Tensor:
        """Return the divisor of the last step for `param`, before its square root and bias correction.

        With amsgrad this is the running maximum. The tensor, of the parameter's shape, is the optimizer's own
        state: do not write to it.

        Raises:
            KeyError: no step has updated `param` yet.
        """
        if not self.state.get(param):
            raise KeyError("this parameter has not been updated by a step yet")
        state = self.state[param]
        moment: Tensor = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        return moment

    def _step(self) -> None:
        """Perform the wrapped optimizer's step with corrected second moments."""
        started: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            started.update(self._correct(group))
        self.optimizer.step()
        # Only after the step: the wrapped optimizer initialises a parameter's state when it finds it empty.
        for param, mean in started.items():
            self.state[param].update({_MEAN: mean, _STEPS: 1, _WORKERS: self.num_workers})

    def _correct(self, group: dict[str, Any]) -> dict[Tensor, Tensor]:
        """Prepare one group's second moments; return the means of parameters that start with this step."""
        grad_decay = _decay_in_gradient(group)
        started: dict[Tensor, Tensor] = {}
        alike: defaultdict[tuple[torch.device, torch.dtype, int, float], list[MomentTensors]] = defaultdict(list)
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise RuntimeError("VarianceCorrection does not support sparse gradients; use dense ones")
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
            advance(tracks, Coefficients(beta2, step, self.num_workers, workers_before, grad_decay))
        return started

    def _check(self, group: dict[str, Any]) -> None:
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise ConfigurationError(
                    f"VarianceCorrection cannot wrap an optimizer with {option}=True, since its factors "
                    f"change at every step outside of the graph: set {option}=False."
                )
        for param in group["params"]:
            if not param.is_floating_point() or param.dtype.itemsize < 4:
                raise ConfigurationError(
                    f"VarianceCorrection needs parameters in float32 or float64, not {param.dtype}, "
                    f"whose moments cannot resolve the decay of beta2: use mixed precision "
                    f"(precision='bf16-mixed') instead."
                )


def _decay_in_gradient(group: dict[str, Any]) -> float:
    """Return the weight decay inside the moments; negative under maximize, where our mean has the other sign."""
    if group.get("decoupled_weight_decay", False):
        return 0.0
    return float(-group["weight_decay"] if group["maximize"] else group["weight_decay"])


def _adopt(state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Return this wrapper's part of the state of a parameter that the wrapped optimizer has already stepped alone.

    The mean of its past gradients is unknown; the first moment is the best estimate of it.
    """
    steps = int(state["step"])
    mean = state["exp_avg"] / (1.0 - float(group["betas"][0]) ** steps)
    return {_MEAN: -mean if group["maximize"] else mean, _STEPS: steps, _WORKERS: 1.0}
