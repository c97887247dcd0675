"""Adapts the user's optimizer to a stage of a pipeline."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.buckets import FlatBucket
from lightning_sdpipe.exchange.payloads import Payload
from lightning_sdpipe.loop.precision import refuse_own_unscaling, scaler_of
from lightning_sdpipe.optim import FrozenVariance, VarianceCorrection, is_adam_family
from lightning_sdpipe.pipeline.digest import options_of
from lightning_sdpipe.topology.groups import ProcessGroups


def refuse_unfit(optimizer: Optimizer, precision: Precision, num_stages: int) -> None:
    """Raise ConfigurationError for an optimizer that would not step as it does in one process."""
    if num_stages == 1:
        return
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            "LBFGS evaluates the loss several times in a step, along directions that depend on the gradients of all "
            "stages, and a pipeline can run it once only. Use AdamW, or SGD with momentum; with num_stages=1 this "
            "works."
        )
    refuse_own_unscaling(optimizer, precision)


def refuse_unfit_momentum(optimizer: Optimizer, payload: Payload) -> None:
    """Raise ConfigurationError unless the optimizer whose momenta ``payload`` sends keeps its variance frozen (1-bit
    Adam): divided by a variance of compression errors, updates would mean nothing."""
    if not payload.momentum:
        return
    if not isinstance(optimizer, FrozenVariance) or optimizer.after != payload.after:
        raise ConfigurationError(
            f"{payload} sends momenta, for which Adam's variance has to be frozen after as many updates: return "
            f"FrozenVariance(optimizer, after={payload.after}) of lightning_sdpipe.optim from configure_optimizers, or "
            "set momentum=0."
        )
    betas = {group["betas"][0] for group in optimizer.param_groups}
    if betas != {payload.momentum}:
        raise ConfigurationError(
            f"{payload} sends momenta of {payload.momentum}, and the optimizer's first beta is "
            f"{', '.join(map(str, sorted(betas)))}: give both the same."
        )


def agree_on_groups(optimizer: Optimizer, module: nn.Module, groups: ProcessGroups) -> None:
    """Put the parameters of ``optimizer`` into rank 0's order: the state of the whole optimizer numbers them in that
    order, and a set of parameters has a different order in each process. Every rank must call it.

    Raises:
        ConfigurationError: a group has other parameters here than on rank 0.
        WorkerFailedError: another rank is gone.
    """
    name_of = {id(p): name for name, p in module.named_parameters()}
    mine = [[name_of.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    first: list[list[str]] = p2p.broadcast_value(mine, 0, groups.world)
    nothing: list[str] = []
    for number, (here, there) in enumerate(zip_longest(mine, first, fillvalue=nothing)):
        only_here, only_there = Counter(here) - Counter(there), Counter(there) - Counter(here)
        if only_here or only_there:
            name = next(iter(only_here + only_there)) or "a parameter that the module does not have"
            raise ConfigurationError(
                f"configure_optimizers makes different parameter groups on rank {groups.rank} and on rank 0: group "
                f"{number} has {name!r} {'here' if only_here else 'there'} only. Every rank has every parameter, those "
                "of other stages without values: sort them by what is the same on all ranks, such as their names, "
                "shapes, modules and attributes, and leave none out."
            )
    for group, here, there in zip(optimizer.param_groups, mine, first, strict=True):
        if here != there:
            held: dict[str, list[nn.Parameter]] = {}
            for name, parameter in zip(here, group["params"], strict=True):
                held.setdefault(name, []).append(parameter)
            group["params"] = [held[name].pop(0) for name in there]


def refuse_unlike_options(optimizers: Sequence[Optimizer], group: dist.ProcessGroup) -> None:
    """Raise ConfigurationError if the workers of ``group``, which apply the same gradients, have different optimizer
    options. All of them must call it."""
    if group.size() == 1:
        return
    options = options_of(optimizers)
    if not p2p.same(crc32(repr(options).encode()), group, "comparing the options of the optimizer"):
        raise ConfigurationError(
            "The options of the optimizer are not the same in all pipelines, so equal gradients would make their "
            f"models differ; on rank {dist.get_rank()} they are {options}. A hook has changed them by results of "
            "a pipeline's own batches: change them in on_validation_end or on_train_epoch_end by "
            "trainer.callback_metrics, which are the same on all workers, or average models "
            "(sync='semi_decentralized') instead of gradients."
        )


def corrected(optimizer: Optimizer, models: float, sync: object) -> Optimizer:
    """Return ``optimizer`` with variance correction for the mean of ``models`` models, which ``sync`` averages. If
    there is nothing to correct, return it unchanged, and tell the user why."""
    if not is_adam_family(optimizer):
        rank_zero_info(f"variance_correction=True does not apply to {type(optimizer).__name__}: not of Adam's family.")
        return optimizer
    if models == 1:
        rank_zero_info(f"variance_correction=True has nothing to correct: {sync} averages no models here.")
    return VarianceCorrection(optimizer, num_workers=models)


def follow(optimizer: Optimizer, models: float) -> None:
    """Correct for the mean of ``models`` models from the next step on, if that number has changed by more than 5 %: a
    change costs a pass over the optimizer's memory."""
    if isinstance(optimizer, VarianceCorrection) and abs(models / optimizer.num_workers - 1) > 0.05:
        optimizer.num_workers = models


class OptimizerProgress:
    """State of a stage's optimizer and loss scale, as replicas take it over from each other.

    Args:
        optimizers: returns the Trainer's, once there are any.
        precision: the Trainer's.
        buckets: the stage's parameters, in an order that is the same on all replicas; the sequence may change.
        only: the parameters that count; None if all do.
    """

    def __init__(
        self,
        optimizers: Callable[[], Sequence[Optimizer]],
        precision: Precision,
        buckets: Sequence[FlatBucket],
        only: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self._optimizers = optimizers
        self._precision = precision
        self._buckets = buckets
        self._only = only

    def digest(self) -> int:
        """Digest sums of the tensors; see :class:`~lightning_sdpipe.sync.synchronizer.TrainingState`."""
        states = [[optimizer.state.get(p, {}) for p in self._parameters()] for optimizer in self._optimizers()]
        sums = [
            [(name, _sum(value) if isinstance(value, Tensor) else repr(value)) for name, value in state.items()]
            for by_parameter in states
            for state in by_parameter
        ]
        scaler = scaler_of(self._precision)
        text = repr((sums, None if scaler is None else scaler.state_dict()))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)

    def save(self) -> bytes:
        """Save the state; see :class:`~lightning_sdpipe.sync.synchronizer.TrainingState`."""
        states = [
            [_packed(optimizer.state.get(p, {}), p) for p in self._parameters()] for optimizer in self._optimizers()
        ]
        scaler = scaler_of(self._precision)
        file = io.BytesIO()
        torch.save((states, None if scaler is None else scaler.state_dict()), file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        """Load the state; see :class:`~lightning_sdpipe.sync.synchronizer.TrainingState`."""
        states, scale = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
        for optimizer, by_parameter in zip(self._optimizers(), states, strict=True):
            for p, state in zip(self._parameters(), by_parameter, strict=True):
                optimizer.state.pop(p, None)
                if state:  # an empty one would be made by looking
                    optimizer.state[p] = {k: v.to(p.device) if beside else v for k, (v, beside) in state.items()}
        scaler = scaler_of(self._precision)
        if scaler is not None:
            scaler.load_state_dict(scale)

    def of(self, parameters: Sequence[nn.Parameter]) -> OptimizerProgress:
        """Return the part for ``parameters``; see :class:`~lightning_sdpipe.sync.synchronizer.TrainingState`."""
        return OptimizerProgress(self._optimizers, self._precision, self._buckets, parameters)

    def _parameters(self) -> Sequence[nn.Parameter]:
        if self._only is not None:
            return self._only
        return [p for bucket in self._buckets for p in bucket.all_parameters]


def _packed(state: dict[str, Any], parameter: Tensor) -> dict[str, tuple[Any, bool]]:
    """Return each value, tensors on the CPU, and whether it lies beside the parameter; counters often do not."""
    return {
        name: (value.cpu(), value.device == parameter.device) if isinstance(value, Tensor) else (value, False)
        for name, value in state.items()
    }


def _sum(value: Tensor) -> float:
    return float((torch.view_as_real(value) if value.is_complex() else value).sum(dtype=torch.float64))
