"""16-bit mixed precision with a loss scale, in a pipeline.

The backward of a micro-batch runs inside ``training_step``, before Lightning scales the loss. So the loss of each
micro-batch is scaled there, and the gradients are divided by that scale when Lightning's ``backward`` brings it again.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.pipeline.pipedream import PipeDreamPipeline
from lightning_sdpipe.pipeline.ready_signal import ReadySignal
from lightning_sdpipe.topology.groups import ProcessGroups

_Scaler = TypeVar("_Scaler", bound=torch.amp.GradScaler)


class _VotingScaler(ShardedGradScaler):
    """A scaler that tells ``ready`` when it is known whether any stage has overflowed."""

    ready: ReadySignal

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        self.ready.passed("vote")

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return found or {found_inf.device: found_inf}  # a stage without gradients votes, too


def agree_on_overflow(precision: Precision, groups: ProcessGroups, ready: ReadySignal) -> None:
    """Make the stages of a pipeline skip the same steps: an overflow on one of them counts on all. ``ready`` is told
    when all of them have been waited for."""
    if not isinstance(precision, MixedPrecision) or precision.scaler is None:
        return
    scaler = precision.scaler
    if not isinstance(scaler, _VotingScaler):  # else of an earlier run of this strategy
        scaler = precision.scaler = _like(scaler, _VotingScaler, process_group=groups.pipeline)
    scaler.ready = ready


def _like(scaler: torch.amp.GradScaler, kind: type[_Scaler], **options: Any) -> _Scaler:
    """Return another kind of scaler with the same values."""
    return kind(
        device=scaler._device,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
        **options,
    )


class _LateScaler(torch.amp.GradScaler):
    """The scaler of one stage of a pipeline without a flush.

    Gradients come without a loss scale, and Lightning's ``backward`` brings this scaler's own, which is taken out here.
    A gradient that is not finite takes away those of the same mini-batches: of all parameters that this stage holds
    alone, or of all that it shares with the same owners, which then do likewise. The others are updated.

    The last stage's scale is that of the pipeline. It becomes ``backoff_factor`` times the scale that overflowed on any
    stage, unless it is smaller already; after ``growth_interval`` updates without such a report it grows.
    """

    pipeline: PipeDreamPipeline

    def unscale_(self, optimizer: Optimizer) -> None:
        scale = self.get_scale()
        for applied in self.pipeline.applied:
            gradients = [p.grad for p in applied.parameters if p.grad is not None]
            if not gradients:
                continue
            torch._foreach_div_(gradients, scale)
            if not torch.stack(torch._foreach_norm(gradients, math.inf)).isfinite().all():
                self.pipeline.notes.report_overflow(applied.loss_scale)
                for p in applied.parameters:
                    p.grad = None

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if all(p.grad is None for applied in self.pipeline.applied for p in applied.parameters):
            return None
        output: float | None = optimizer.step(*args, **kwargs)
        return output

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if not self.pipeline.is_last:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        overflowed = self.pipeline.notes.take_overflow()
        if overflowed < math.inf:
            scale.clamp_(max=overflowed * self.get_backoff_factor())
            tracker.zero_()
        elif int(tracker.add_(1)) == self.get_growth_interval():
            scale.mul_(self.get_growth_factor())
            tracker.zero_()


def scale_without_flush(precision: Precision, pipeline: PipeDreamPipeline) -> None:
    """Make the stages of a pipeline, which step at different times, use the loss scale of the last one."""
    if not isinstance(precision, MixedPrecision) or precision.scaler is None or not precision.scaler.is_enabled():
        return
    if not isinstance(precision.scaler, _LateScaler):
        precision.scaler = _like(precision.scaler, _LateScaler)
    precision.scaler.pipeline = pipeline
    pipeline.notes.scales = True


def refuse_own_unscaling(optimizer: Optimizer, precision: Precision) -> None:
    """Raise ConfigurationError for an optimizer that looks for overflows by itself, in its own stage only."""
    scaled = isinstance(precision, MixedPrecision) and precision.scaler is not None
    if scaled and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ConfigurationError(
            f"{type(optimizer).__name__}(fused=True) with precision='16-mixed' decides by itself whether to skip a "
            "step that overflowed, and other stages would not skip it. Use fused=False, or precision='bf16-mixed'."
        )


def loss_scale(precision: Precision, device: torch.device) -> Tensor | None:
    """Return the factor that losses are multiplied by now, a scalar on ``device``; None if they are not."""
    scaler = precision.scaler if isinstance(precision, MixedPrecision) else None
    return scaler.scale(torch.ones((), device=device)) if scaler is not None and scaler.is_enabled() else None


def current_scale(precision: Precision) -> float:
    """Return the factor that gradients are multiplied by now; 1 if they are not."""
    scaler = precision.scaler if isinstance(precision, MixedPrecision) else None
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
