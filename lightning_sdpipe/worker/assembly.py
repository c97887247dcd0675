"""Putting together what one worker runs: its part of the module, its links, and its pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity.injector import DelayInjector
from lightning_sdpipe.loop.freezing import Freezing
from lightning_sdpipe.partition.cut_step import CutModel
from lightning_sdpipe.partition.materialise import Initialisation, materialise
from lightning_sdpipe.partition.ownership import Ownership, assign_owners, keep_only, move_the_rest
from lightning_sdpipe.partition.plan import Plan
from lightning_sdpipe.partition.same_memory import SameMemory, held_together
from lightning_sdpipe.pipeline.flush import FlushPipeline
from lightning_sdpipe.pipeline.link import StageLink
from lightning_sdpipe.pipeline.pipedream import PipeDreamPipeline
from lightning_sdpipe.pipeline.pipeline import Pipeline
from lightning_sdpipe.pipeline.shared_parameters import SharedParameters
from lightning_sdpipe.pipeline.stage_runner import StageRunner
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.worker.options import Options


@dataclass(frozen=True)
class Assembled:
    """What a worker runs and holds."""

    ownership: Ownership
    cut_model: CutModel
    runners: Sequence[StageRunner]  # of its stages, in order
    pipeline: Pipeline
    freezing: Freezing  # which of its parameters train
    buffers: Sequence[Tensor]
    delays: DelayInjector

    @property
    def changed_late(self) -> Sequence[str]:
        """The attributes of modules that training steps change in Python where only the last stage comes. Without a
        flush, stages are at different mini-batches, and none can be told what they are."""
        travel = self.runners[0].travel.get("training_step")
        return travel.late if travel is not None and self.pipeline.flushes else ()

    @property
    def logged_late(self) -> Sequence[str]:
        """The metrics that training steps log where the first stage does not come."""
        travel = self.runners[0].travel.get("training_step")
        return travel.metrics if travel is not None else ()


def assemble(
    module: LightningModule,
    plan: Plan,
    groups: ProcessGroups,
    options: Options,
    initialisation: Initialisation,
    device: torch.device,
    memory: SameMemory | None = None,
) -> Assembled:
    """Keeps this rank's part of ``module``, equal on all pipelines, on ``device``, and the rest on ``meta``. ``memory``
    is what was one memory before the plan was made, which may have moved the module; None if nothing has.

    Every rank must call it.

    Raises:
        ConfigurationError: the user's code would run more often than once for a micro-batch, and counts how often.
    """
    refuse_counting(plan, options.stages_per_worker)
    worker, pipeline_number = groups.mesh.locate(groups.rank)
    chain, spans = plan.chain, plan.module_spans
    ownership = assign_owners(module, chain, spans, options.num_stages, plan.readers, memory)
    by_stage = assign_owners(module, chain, spans, readers=plan.readers, memory=memory)
    shared = SharedParameters(module, ownership, by_stage, groups, options.run_timeout)
    materialise(module, ownership, worker, initialisation)
    keep_only(module, ownership, worker, device)
    move_the_rest(module, device)
    parameters = [p for p in module.parameters() if not p.is_meta]
    buffers = [torch.view_as_real(b) if b.is_complex() else b for b in module.buffers() if not b.is_meta]
    late = {id(p) for p in shared.parameters}  # complete when all owners are
    backwards = parameters[::-1]
    in_order = sorted(backwards, key=lambda p: id(p) in late)
    freezing = Freezing(module, in_order, groups, held_together(module, ownership.memory))
    shared.make_equal()
    for tensor in (*(bucket.buffer for bucket in freezing.buckets), *buffers):
        dist.broadcast(tensor, min(groups.mesh.stage_ranks(worker)), group=groups.stage)

    numbers = range(worker, len(spans), options.num_stages)
    cut_model = CutModel(module, chain, [spans[number] for number in numbers], device)
    ranks = tuple(groups.mesh.pipeline_ranks(pipeline_number)) * options.stages_per_worker
    bound = 2 if options.stages_per_worker == 1 else None
    lanes = groups.lanes(len(spans), device, options.run_timeout)
    runners = [
        StageRunner(
            module,
            cut_model,
            spans[number],
            StageLink(groups.pipeline, ranks, number, device, options.dynamic_shapes, bound, lanes=lanes),
            plan.travel,
        )
        for number in numbers
    ]
    settle = None if device.type == "cpu" else partial(torch.accelerator.synchronize, device)
    delays = DelayInjector(options.delays, worker, pipeline_number, groups.rank, settle=settle)
    pipeline: Pipeline
    if options.schedule == "pipedream":
        pipeline = PipeDreamPipeline(runners[0], freezing.trained, shared, delays)
    else:
        pipeline = FlushPipeline(
            runners, options.num_stages, freezing.trained, shared, delays, options.schedule, options.num_micro_batches
        )
    return Assembled(ownership, cut_model, runners, pipeline, freezing, buffers, delays)


def refuse_counting(plan: Plan, stages_per_worker: int) -> None:
    """Raises ConfigurationError if workers run the step several times for a micro-batch, and it counts how often."""
    for step, travel in plan.travel.items() if stages_per_worker > 1 else ():
        if travel.counted:
            raise ConfigurationError(
                f"{step} changes {travel.counted[0]} by what it was before, and a worker with {stages_per_worker} "
                "stages runs the step once for each. Change it in on_train_batch_end, or use a schedule with one stage "
                "for each worker."
            )
