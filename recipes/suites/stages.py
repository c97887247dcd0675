"""One stage of a module on this rank, planned and assembled as in the strategy, without a Trainer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from lightning_sdpipe.partition import plan, rehearsal
from lightning_sdpipe.partition.materialise import Initialisation
from lightning_sdpipe.partition.rehearsal import StepCalls
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult
from lightning_sdpipe.pipeline.micro_batches import split
from lightning_sdpipe.pipeline.stage_runner import Step
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.worker.assembly import Assembled, assemble
from lightning_sdpipe.worker.options import Options
from recipes.harness.processes import TRANSFER_TIMEOUT

CPU = torch.device("cpu")
TRAINING = Step("training_step", (0,), nullcontext)


def make_plan(
    module: L.LightningModule, num_stages: int, blocks: Sequence[str] | None, batch: Any, num_micro_batches: int
) -> plan.Plan:
    """Plan equally many blocks for each stage, after a rehearsal with the first and last micro-batch of ``batch``."""
    parts = [part.batch for part in split(batch, num_micro_batches)]
    steps = [StepCalls("training_step", [(part, (0,)) for part in (parts[0], parts[-1])], trains=True)]

    def rehearse(chain: Sequence[str]) -> RehearsalResult:
        return rehearsal.rehearse(copy.deepcopy(module), chain, steps, CPU)  # a copy, since it changes the module

    return plan.plan(module, num_stages, "uniform", blocks, rehearse=rehearse)


def open_pipeline() -> ProcessGroups:
    """Return the process groups of one pipeline with all ranks as its stages."""
    return ProcessGroups.open(Mesh.build(dist.get_world_size(), dist.get_world_size()), TRANSFER_TIMEOUT)


def open_stage(
    groups: ProcessGroups,
    module: L.LightningModule,
    blocks: Sequence[str],
    batch: Any,
    schedule: str = "1f1b",
    num_micro_batches: int = 1,
) -> Assembled:
    """Cut ``module`` over the ranks and keep this rank's part, in flat buckets.

    Args:
        groups: process groups of one pipeline.
        module: the whole module, with the same values on every rank.
        blocks: paths that name its chain.
        batch: a mini-batch to rehearse with.
        schedule: as for :class:`~lightning_sdpipe.SDPipeStrategy`.
        num_micro_batches: as for :class:`~lightning_sdpipe.SDPipeStrategy`.
    """
    num_stages = groups.mesh.num_stages
    stages = make_plan(module, num_stages, blocks, batch, num_micro_batches)
    options = Options(num_stages, schedule=schedule, num_micro_batches=num_micro_batches, run_timeout=TRANSFER_TIMEOUT)
    return assemble(module, [stages], groups, options, Initialisation(), CPU)
