"""Gradient clipping by the norm of all parameters, which no worker of a pipeline holds together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.partition.sections import Sections
from lightning_sdpipe.pipeline.pipedream import PipeDreamPipeline
from lightning_sdpipe.pipeline.ready_signal import ReadySignal
from lightning_sdpipe.topology.groups import ProcessGroups


def clips_by_norm(trainer: Trainer) -> bool:
    """Return whether the Trainer clips by norm, or the module may."""
    by_norm = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
    return by_norm or is_overridden("configure_gradient_clipping", trainer.lightning_module)


def clip_over_stages(
    precision: Precision,
    module: nn.Module,
    ownership: Ownership,
    groups: ProcessGroups,
    ready: ReadySignal,
    sections: Sections | None = None,
) -> None:
    """Make ``precision`` clip by the norm over all stages of this pipeline, which must step together; ``ready`` is told
    when the norm is known. With ``sections`` it is the same on all pipelines, to the last bit."""
    counted = _counted(module, ownership, groups)
    if sections is None:
        square = _square
    else:
        names = {id(p): name for name, p in module.named_parameters()}
        section_of = {id(p): sections.parameters[names[id(p)]] for p in counted}
        square = partial(_square_by_section, section_of, len(sections.owners))
    precision.__dict__["clip_grad_by_norm"] = partial(_clip_by_norm, counted, groups.pipeline, ready, square)
    precision.__dict__["main_params"] = _held  # by value


def clip_without_flush(
    precision: Precision,
    module: nn.Module,
    ownership: Ownership,
    groups: ProcessGroups,
    pipeline: PipeDreamPipeline,
    ready: ReadySignal,
) -> None:
    """Clip likewise where stages step at different times: by the norm over all stages as far as this one knows it, see
    :mod:`lightning_sdpipe.pipeline.stage_metadata`."""
    counted = _counted(module, ownership, groups)
    precision.__dict__["clip_grad_by_norm"] = partial(_clip_by_known_norm, counted, pipeline, ready)
    precision.__dict__["main_params"] = _held


def _counted(module: nn.Module, ownership: Ownership, groups: ProcessGroups) -> list[nn.Parameter]:
    """Return the parameters whose gradients make up this stage's part of the norm: a shared one counts on its first
    stage only."""
    stage, _ = groups.mesh.locate(groups.rank)
    return [p for name, p in module.named_parameters() if ownership.stages[name][0] == stage]


def _clip_by_known_norm(
    counted: Sequence[nn.Parameter],
    pipeline: PipeDreamPipeline,
    ready: ReadySignal,
    optimizer: Optimizer,
    clip_val: float,
) -> None:
    """
    Raise:
        ConfigurationError: it could not be known that gradients would be clipped.
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
        counted: whose gradients make up this stage's part of the norm; a shared parameter counts on one stage only.
        pipeline: the stages.
        ready: is told when all of them have been waited for.
        square_of: that of the norm over all stages, of which these parameters are this stage's part.
        optimizer: whose gradients are clipped.
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
    """Return the square as :func:`_square` does. One stage of a pipeline computes the square of a section, and it is
    added to zeros, so the set of stages changes no bit."""
    squares = torch.zeros(count, dtype=torch.float64)
    for parameter in counted:
        if parameter.grad is not None:
            squares = squares.to(parameter.grad.device)
            norm = torch.linalg.vector_norm(parameter.grad, dtype=_wide(parameter.grad))
            squares[section_of[id(parameter)]] += norm.real.square()
    with waiting_for(pipeline, "clipping gradients"):
        dist.all_reduce(squares, group=pipeline)
    total = squares.new_zeros(())
    for square in squares:
        total = total + square
    return total


def _wide(gradient: Tensor) -> torch.dtype:
    return torch.complex128 if gradient.is_complex() else torch.float64


def _applied(counted: Sequence[nn.Parameter], optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that ``optimizer`` applies the gradients of, as in one process."""
    applied = {id(p) for p in _held(optimizer)}
    return [p for p in counted if p.grad is not None and id(p) in applied]


def _held(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return what this stage holds of the optimizer's parameters; hooks see the others', too."""
    return [p for group in optimizer.param_groups for p in group["params"] if not p.is_meta]
