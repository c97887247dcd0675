"""Gradient clipping by the norm of all parameters, which no worker of a pipeline holds together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_sdpipe.groups import ProcessGroups
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.partition.ownership import Ownership


def clip_over_stages(
    precision: Precision,
    module: nn.Module,
    ownership: Ownership,
    groups: ProcessGroups,
    known: Callable[[], None] = lambda: None,
) -> None:
    """Makes ``precision`` clip by the norm over all stages of this pipeline, which must step together; ``known`` is
    called when the norm is."""
    stage, _ = groups.mesh.locate(groups.rank)
    counted = [p for name, p in module.named_parameters() if ownership.stages[name][0] == stage]
    precision.__dict__["clip_grad_by_norm"] = partial(_clip_by_norm, counted, groups.pipeline, known)


def _clip_by_norm(
    counted: Sequence[nn.Parameter],
    pipeline: dist.ProcessGroup,
    known: Callable[[], None],
    optimizer: Optimizer,
    clip_val: float,
) -> None:
    """Scales all gradients by ``clip_val / norm`` if that is below one.

    Args:
        counted: whose gradients make up this stage's part of the norm; a shared parameter counts on one stage only.
        pipeline: the stages.
        known: called when all of them have been waited for.
        optimizer: whose gradients are clipped.
        clip_val: the L2 norm above which they are.

    Raises:
        WorkerFailedError: another stage is gone.
    """
    gradients = [p.grad for p in counted if p.grad is not None]
    square = get_total_norm(gradients).square()
    square = square.to(next((g.device for g in gradients), square.device))
    with waiting_for(pipeline, "clipping gradients"):
        dist.all_reduce(square, group=pipeline)
    known()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    clip_grads_with_norm_(parameters, clip_val, square.sqrt())
