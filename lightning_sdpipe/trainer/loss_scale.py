"""16-bit mixed precision with a loss scale, in a pipeline.

The backward of a micro-batch runs inside ``training_step``, before Lightning scales the loss. So the loss of each
micro-batch is scaled there, and the gradients are divided by that scale when Lightning's ``backward`` brings it again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.groups import ProcessGroups


class _VotingScaler(ShardedGradScaler):
    """Calls ``voted`` when it is known whether any stage has overflowed."""

    voted: Callable[[], None]

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        self.voted()


def agree_on_overflow(precision: Precision, groups: ProcessGroups, voted: Callable[[], None] = lambda: None) -> None:
    """Makes the stages of a pipeline skip the same steps: an overflow on one of them counts on all. ``voted`` is called
    when all of them have been waited for."""
    if not isinstance(precision, MixedPrecision) or precision.scaler is None:
        return
    scaler = precision.scaler
    if isinstance(scaler, _VotingScaler):  # of an earlier run of this strategy
        scaler.voted = voted
        return
    precision.scaler = _VotingScaler(
        device=scaler._device,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
        process_group=groups.pipeline,
    )
    precision.scaler.voted = voted


def refuse_own_unscaling(optimizer: Optimizer, precision: Precision) -> None:
    """Raises ConfigurationError for an optimizer that looks for overflows by itself, in its own stage only."""
    scaled = isinstance(precision, MixedPrecision) and precision.scaler is not None
    if scaled and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ConfigurationError(
            f"{type(optimizer).__name__}(fused=True) with precision='16-mixed' decides by itself whether to skip a "
            "step that overflowed, and other stages would not skip it. Use fused=False, or precision='bf16-mixed'."
        )


def loss_scale(precision: Precision, device: torch.device) -> Tensor | None:
    """The factor that losses are multiplied by now, a scalar on ``device``; None if they are not."""
    scaler = precision.scaler if isinstance(precision, MixedPrecision) else None
    return scaler.scale(torch.ones((), device=device)) if scaler is not None and scaler.is_enabled() else None
