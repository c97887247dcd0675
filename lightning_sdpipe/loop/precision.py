"""Adapts a precision plugin to the stages of a pipeline.

Gradients are clipped by the norm of all parameters, which no worker of a pipeline holds together.

In 16-bit mixed precision with a loss scale, the backward of a micro-batch runs inside ``training_step``, before
Lightning scales the loss. So the loss of each micro-batch is scaled there, and the gradients are divided by that scale
when Lightning's ``backward`` applies it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.partition.sections import Sections
from lightning_sdpipe.pipeline.flush import FlushPipeline
from lightning_sdpipe.pipeline.gradients import LastWait, ReadySignal
from lightning_sdpipe.pipeline.pipedream import PipeDreamPipeline
from lightning_sdpipe.topology.groups import ProcessGroups

_Scaler = TypeVar("_Scaler", bound=torch.amp.GradScaler)


def clips_by_norm(trainer: Trainer) -> bool:
    """Return whether the Trainer clips by norm, or the module may."""
    by_norm = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
    return by_norm or is_overridden("configure_gradient_clipping", trainer.lightning_module)


def last_wait(trainer: Trainer, num_stages: int, flush: bool) -> LastWait:
    """Return the point of an update after which it waits for no other stage. A module with its own clipping may never
    ask for the norm; then it is the end of the step. Without a flush there is no vote."""
    if num_stages == 1:
        return "backward"
    if clips_by_norm(trainer):
        return "norm"
    return "vote" if flush and scaler_of(trainer.precision_plugin) is not None else "backward"


def adapt_precision(
    trainer: Trainer,
    ownership: Ownership,
    groups: ProcessGroups,
    pipeline: FlushPipeline | PipeDreamPipeline,
    ready: ReadySignal,
    sections: Sections | None,
) -> None:
    """Make the precision plugin of ``trainer`` clip by the norm over all stages of this pipeline, and the stages skip
    the same steps; ``ready`` is told when the other stages have been waited for. With ``sections`` the norm is the same
    on all pipelines, to the last bit.

    Without a flush stages step at different times: there the norm is that over all stages as far as this one knows it
    (:mod:`lightning_sdpipe.pipeline.stage_metadata`), and the loss scale is that of the last one.
    """
    module, precision = trainer.lightning_module, trainer.precision_plugin
    stage, _ = groups.mesh.locate(groups.rank)
    counted = [p for name, p in module.named_parameters() if ownership.stages[name][0] == stage]
    if isinstance(pipeline, PipeDreamPipeline):
        pipeline.notes.norms = clips_by_norm(trainer)
        clip = partial(_clip_by_known_norm, counted, pipeline, ready)
        _scale_without_flush(precision, pipeline)
    else:
        square = _square
        if sections is not None:
            names = {id(p): name for name, p in module.named_parameters()}
            section_of = {id(p): sections.parameters[names[id(p)]] for p in counted}
            square = partial(_square_by_section, section_of, len(sections.owners))
        clip = partial(_clip_by_norm, counted, groups.pipeline, ready, square)
        _agree_on_overflow(precision, groups, ready)
    precision.__dict__["clip_grad_by_norm"] = clip
    precision.__dict__["main_params"] = _held  # by value


def _clip_by_known_norm(
    counted: Sequence[nn.Parameter],
    pipeline: PipeDreamPipeline,
    ready: ReadySignal,
    optimizer: Optimizer,
    clip_val: float,
) -> None:
    """Clip by the norms of this stage's mini-batches, as far as they are known.

    Args:
        counted: parameters whose gradients make up this stage's part of the norm; a shared one counts on its first
            stage only.
        pipeline: tells the norms.
        ready: is told when other stages have been waited for.
        optimizer: the optimizer whose gradients are clipped.
        clip_val: the L2 norm above which they are.

    Raises:
        ConfigurationError: nothing said beforehand that gradients would be clipped by norm.
        WorkerFailedError: another stage is gone.
    """
    if not pipeline.notes.norms:
        raise ConfigurationError(
            "Gradients are clipped by norm although neither gradient_clip_val was given to the Trainer nor "
            "configure_gradient_clipping is overridden, so that with schedule='pipedream' no stage was told the norms "
            "of the others. Do one of the two."
        )
    gradients = [p.grad for p in _applied(counted, optimizer) if p.grad is not None]
    norms = pipeline.norms(float(get_total_norm(gradients).double().square()))
    ready.passed("norm")
    for norm in norms:
        clip_grads_with_norm_(norm.parameters, clip_val, torch.tensor(math.sqrt(norm.square)))


def _clip_by_norm(
    counted: Sequence[nn.Parameter],
    pipeline: dist.ProcessGroup,
    ready: ReadySignal,
    square_of: Callable[[Sequence[nn.Parameter], dist.ProcessGroup], Tensor],
    optimizer: Optimizer,
    clip_val: float,
) -> None:
    """Scale all gradients by ``clip_val / norm`` if that is below one.

    Args:
        counted: parameters whose gradients make up this stage's part of the norm; a shared one counts on one stage
            only.
        pipeline: the stages.
        ready: is told when all of them have been waited for.
        square_of: returns the square of the norm over all stages, given the parameters of this stage's part.
        optimizer: the optimizer whose gradients are clipped.
        clip_val: the L2 norm above which they are.

    Raises:
        WorkerFailedError: another stage is gone.
    """
    square = square_of(_applied(counted, optimizer), pipeline)
    ready.passed("norm")
    clip_grads_with_norm_(_held(optimizer), clip_val, square.sqrt())


def _square(counted: Sequence[nn.Parameter], pipeline: dist.ProcessGroup) -> Tensor:
    gradients = [p.grad for p in counted if p.grad is not None]
    square = get_total_norm(gradients).square()
    square = square.to(next((g.device for g in gradients), square.device))
    with waiting_for(pipeline, "clipping gradients"):
        dist.all_reduce(square, group=pipeline)
    return square


def _square_by_section(
    section_of: Mapping[int, int], count: int, counted: Sequence[nn.Parameter], pipeline: dist.ProcessGroup
) -> Tensor:
    """Return the square as :func:`_square` does. One stage of a pipeline computes the square of a section, and the
    others add zeros to it, so the cut changes no bit."""
    squares = torch.zeros(count, dtype=torch.float64)
    for parameter in counted:
        if parameter.grad is not None:
            squares = squares.to(parameter.grad.device)
            wide = torch.complex128 if parameter.grad.is_complex() else torch.float64
            norm = torch.linalg.vector_norm(parameter.grad, dtype=wide)
            squares[section_of[id(parameter)]] += norm.real.square()
    with waiting_for(pipeline, "clipping gradients"):
        dist.all_reduce(squares, group=pipeline)
    total = squares.new_zeros(())
    for square in squares:
        total = total + square
    return total


def _applied(counted: Sequence[nn.Parameter], optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters whose gradients ``optimizer`` applies, as in one process."""
    applied = {id(p) for p in _held(optimizer)}
    return [p for p in counted if p.grad is not None and id(p) in applied]


def _held(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return what this stage holds of the optimizer's parameters; hooks see the others', too."""
    return [p for group in optimizer.param_groups for p in group["params"] if not p.is_meta]


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


def _agree_on_overflow(precision: Precision, groups: ProcessGroups, ready: ReadySignal) -> None:
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

    Gradients come without a loss scale, and Lightning's ``backward`` multiplies them by this scaler's, which is divided
    out here. A gradient that is not finite discards those of the same mini-batches: of all parameters that this stage
    holds alone, or of all that it shares with the same owners, which then discard theirs. The others are updated.

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


def _scale_without_flush(precision: Precision, pipeline: PipeDreamPipeline) -> None:
    """Make the stages of a pipeline, which step at different times, use the loss scale of the last one."""
    if not isinstance(precision, MixedPrecision) or precision.scaler is None or not precision.scaler.is_enabled():
        return
    if not isinstance(precision.scaler, _LateScaler):
        precision.scaler = _like(precision.scaler, _LateScaler)
    precision.scaler.pipeline = pipeline
    pipeline.notes.scales = True


def refuse_own_unscaling(optimizer: Optimizer, precision: Precision) -> None:
    """Raise ConfigurationError for an optimizer that looks for overflows by itself, in its own stage only."""
    if scaler_of(precision) is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ConfigurationError(
            f"{type(optimizer).__name__}(fused=True) with precision='16-mixed' decides by itself whether to skip a "
            "step that overflowed, and other stages would not skip it. Use fused=False, or precision='bf16-mixed'."
        )


def scaler_of(precision: Precision) -> torch.amp.GradScaler | None:
    """Return the scaler of losses in 16-bit mixed precision; None where they are not scaled."""
    return precision.scaler if isinstance(precision, MixedPrecision) else None


def loss_scale(precision: Precision, device: torch.device) -> Tensor | None:
    """Return the factor that losses are multiplied by now, a scalar on ``device``; None if they are not."""
    scaler = scaler_of(precision)
    return scaler.scale(torch.ones((), device=device)) if scaler is not None and scaler.is_enabled() else None


def current_scale(precision: Precision) -> float:
    """Return the factor that gradients are multiplied by now; 1 if they are not."""
    scaler = scaler_of(precision)
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
