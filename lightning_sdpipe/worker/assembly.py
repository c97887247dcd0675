"""Assembly of one worker: its part of the module, its links, and its pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.buckets import Freezing
from lightning_sdpipe.exchange.held_buffers import HeldBuffers
from lightning_sdpipe.exchange.sectioned import OwnSections
from lightning_sdpipe.heterogeneity.injector import DelayInjector
from lightning_sdpipe.partition.cut_step import CutModel
from lightning_sdpipe.partition.materialise import Initialisation, materialise
from lightning_sdpipe.partition.ownership import Ownership, assign_owners, keep_only, move_the_rest
from lightning_sdpipe.partition.plan import Plan
from lightning_sdpipe.partition.same_memory import SameMemory, held_together
from lightning_sdpipe.partition.sections import Sections, sections_of
from lightning_sdpipe.pipeline.flush import FlushPipeline
from lightning_sdpipe.pipeline.link import StageLink
from lightning_sdpipe.pipeline.lock_step import LockStep
from lightning_sdpipe.pipeline.pipedream import PipeDreamPipeline
from lightning_sdpipe.pipeline.shared_parameters import SharedParameters
from lightning_sdpipe.pipeline.stage_runner import StageRunner
from lightning_sdpipe.topology.groups import ProcessGroups, Replicas
from lightning_sdpipe.worker.options import Options


@dataclass(frozen=True)
class Assembled:
    """The parts that a worker runs and holds."""

    ownership: Ownership
    cut_model: CutModel
    runners: Sequence[StageRunner]  # those of its stages, in order
    pipeline: FlushPipeline | PipeDreamPipeline
    freezing: Freezing  # records which of its parameters train
    buffers: HeldBuffers
    delays: DelayInjector
    sections: Sections | None = None
    """Sections of the chain, if pipelines are cut differently."""
    own_sections: OwnSections | None = None
    """Sections that this worker averages."""
    shared: SharedParameters | None = None
    """Parameters with copies that are kept equal, where there are sections."""
    lock_step: LockStep | None = None
    """Calls of blocks outside of training, if the pipeline has other workers."""

    @property
    def changed_late(self) -> Sequence[str]:
        """Attributes of modules that training steps change in Python at a point that only the last stage reaches. None
        without a flush: stages are then at different mini-batches, so the values cannot be sent."""
        travel = self.runners[0].travel.get("training_step")
        return travel.late if travel is not None and self.pipeline.flushes else ()

    @property
    def logged_late(self) -> Sequence[str]:
        """Metrics that training steps log at a point that the first stage does not reach."""
        travel = self.runners[0].travel.get("training_step")
        return travel.metrics if travel is not None else ()


def assemble(
    module: LightningModule,
    plans: Sequence[Plan],
    groups: ProcessGroups,
    options: Options,
    initialisation: Initialisation,
    device: torch.device,
    memory: SameMemory | None = None,
) -> Assembled:
    """Keep this rank's part of ``module``, equal on all pipelines, on ``device``, and the rest on ``meta``.

    ``memory`` records which tensors shared memory before planning, which may have moved the module; None if nothing has
    moved it. ``plans`` has one for each pipeline, or one for all. Every rank must call it.

    Raises:
        ConfigurationError: the user's code counts its calls, and would run several times for a micro-batch.
    """
    worker, pipeline_number = groups.mesh.locate(groups.rank)
    unlike = not groups.mesh.alike
    plan = plans[pipeline_number] if unlike else plans[0]
    refuse_counting(plan, options.stages_per_worker)
    chain, spans, num_workers = plan.chain, plan.module_spans, groups.mesh.depth(pipeline_number)
    workers = None if unlike else num_workers  # with one stage each where pipelines are cut differently
    ownerships = [assign_owners(module, chain, p.module_spans, workers, p.readers, memory) for p in plans]
    ownership = ownerships[pipeline_number if unlike else 0]
    by_stage = assign_owners(module, chain, spans, readers=plan.readers, memory=memory)
    here = [ownerships[i if unlike else 0] for i in groups.mesh.pipelines]
    shared = SharedParameters(module, here, by_stage, groups, options.run_timeout)
    sections = sections_of([p.spans for p in plans], ownerships) if unlike else None
    materialise(module, ownership, worker, initialisation)
    keep_only(module, ownership, worker, device)
    move_the_rest(module, device)
    parameters = [p for p in module.parameters() if not p.is_meta]
    buffers = HeldBuffers(module, lambda name: worker in ownership.owners(name))
    late = {name for own in ownerships for _, name in own.shared_parameters(module)}  # complete when all owners are
    names = {id(p): name for name, p in module.named_parameters()}
    backwards = parameters[::-1]
    in_order = sorted(backwards, key=lambda p: names[id(p)] in late)
    together = held_together(module, ownership.memory)
    own_sections = None
    if sections is None:
        freezing = Freezing(module, in_order, groups, together)
        shared.make_equal()
        for tensor in (*(bucket.buffer for bucket in freezing.buckets), *buffers):
            dist.broadcast(tensor, min(groups.mesh.stage_ranks(worker)), group=groups.stage)
        shared.make_buffers_equal(device)
    else:
        own_sections = _open_sections(module, sections, ownerships, groups, options)
        freezing = Freezing(module, in_order, groups, together, own_sections.parameters)
        for number, replicas in own_sections.replicas.items():
            held = [bucket.buffer for bucket in freezing.buckets if bucket.section == number]
            for tensor in (*held, *own_sections.buffers[number]):
                dist.broadcast(tensor, group=replicas.group, group_src=replicas.ranks[0])
        shared.make_equal()
        shared.make_buffers_equal(device)

    numbers = range(worker, len(spans), num_workers)
    cut_model = CutModel(module, chain, [spans[number] for number in numbers], device)
    workers_of = tuple(groups.mesh.pipeline_ranks(pipeline_number))
    lock_step = None
    if num_workers > 1:
        owners = [workers_of[number % num_workers] for number, span in enumerate(spans) for _ in span]
        steps = dict.fromkeys(plan.travel, False) | dict.fromkeys(plan.lock_step, True)
        lock_step = LockStep(groups.pipeline, workers_of, owners, chain, device, steps)
        cut_model.together = lock_step.call
    ranks = workers_of * options.stages_per_worker
    bound = 2 if options.stages_per_worker == 1 else None
    lanes = groups.lanes(options.stages_per_worker, device, options.run_timeout)
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
    pipeline: FlushPipeline | PipeDreamPipeline
    if options.schedule == "pipedream":
        pipeline = PipeDreamPipeline(runners[0], freezing.trained, shared, delays)
    else:
        pipeline = FlushPipeline(
            runners, num_workers, freezing.trained, shared, delays, options.schedule, options.num_micro_batches
        )
    copies = None if sections is None else shared
    parts = ownership, cut_model, runners, pipeline, freezing, buffers, delays
    return Assembled(*parts, sections, own_sections, copies, lock_step)


def _open_sections(
    module: LightningModule,
    sections: Sections,
    ownerships: Sequence[Ownership],
    groups: ProcessGroups,
    options: Options,
) -> OwnSections:
    """Open a process group for each section, two if a thread averages beside training; return what this worker holds
    of the sections that it averages."""
    stage, pipeline = groups.mesh.locate(groups.rank)
    own = {number for number, owners in enumerate(sections.owners) if owners[pipeline] == stage}

    def opened(backend: str | None) -> dict[int, Replicas]:
        found = [groups.open_section(owners, options.run_timeout, backend) for owners in sections.owners]
        return {number: replicas for number, replicas in enumerate(found) if replicas is not None}

    replicas = opened(None)
    beside = opened("gloo") if options.exchange.overlap != "none" else {}
    parameters = {
        parameter: number
        for name, parameter in module.named_parameters()
        if (number := sections.parameters[name]) in own
    }

    def is_of(number: int, name: str) -> bool:
        return sections.owners[number] == tuple(each.owners(name)[-1] for each in ownerships)

    buffers = {number: HeldBuffers(module, partial(is_of, number)) for number in own}
    return OwnSections(replicas, parameters, buffers, beside)


def refuse_counting(plan: Plan, stages_per_worker: int) -> None:
    """Raise ConfigurationError if workers run the step several times for a micro-batch, and it counts its calls."""
    for step, travel in plan.travel.items() if stages_per_worker > 1 else ():
        if travel.counted:
            raise ConfigurationError(
                f"{step} changes {travel.counted[0]} by what it was before, and a worker with {stages_per_worker} "
                "stages runs the step once for each. Change it in on_train_batch_end, or use a schedule with one stage "
                "for each worker."
            )
