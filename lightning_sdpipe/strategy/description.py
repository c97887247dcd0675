"""Description of what each rank runs, and how: what a user looks at when a run is not what was meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.partition.chain import described
from lightning_sdpipe.partition.ownership import assign_owners, parameters_held, saves_nothing
from lightning_sdpipe.partition.plan import Plan
from lightning_sdpipe.partition.same_memory import SameMemory
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.worker.options import Options

_SHOWN = 4  # ranks of a stage that are shown


def what_runs(
    strategy: DDPStrategy,
    options: Options,
    mesh: Mesh,
    plans: Sequence[Plan],
    module: nn.Module,
    memory: SameMemory,
    data: str,
    scheduler: str,
) -> str:
    """Return several lines of text.

    Args:
        strategy: knows how many machines there are, and the devices of this one.
        options: those of the strategy.
        mesh: that of all workers.
        plans: one for each pipeline, or one for all.
        module: the user's, of which this worker has its stage.
        memory: tensors of the module that shared memory before it was cut.
        data: description of how batches reach the pipelines.
        scheduler: the scheduler's address.
    """
    if mesh.alike:
        lines = [f"SDPipe: pipelines × stages = {mesh.num_pipelines} × {len(plans[0].spans)}"]
        lines += _stages(plans[0], module, memory, _workers(strategy, options, mesh.ranks), "")
    else:
        lines = [f"SDPipe: {mesh.num_pipelines} pipelines of {', '.join(map(str, options.depths))} stages"]
        for pipeline, row in zip(mesh.pipelines, mesh.ranks, strict=True):
            workers = _workers(strategy, options, [row])
            lines += _stages(plans[pipeline], module, memory, workers, f"pipeline {pipeline}, ")
    lines += [
        f"schedule: {options.schedule}, {options.num_micro_batches} micro-batches of a mini-batch",
        f"method: {options.sync!r}",
        f"exchange: {'in full precision' if options.exchange == Exchange() else repr(options.exchange)}",
        f"data: {data}",
        f"scheduler: {_where_to_look(strategy, options, scheduler)}",
    ]
    return "\n  ".join(lines)


def _workers(strategy: DDPStrategy, options: Options, rows: Sequence[Sequence[int]]) -> list[list[str]]:
    """Name the workers of each pipeline."""
    devices = strategy.parallel_devices or [strategy.root_device]

    def named(rank: int) -> str:
        if options.depths and strategy.num_nodes > 1:  # machines may have unlike numbers of devices
            return f"rank {rank}"
        node = f" of node {rank // len(devices)}" if strategy.num_nodes > 1 else ""
        return f"rank {rank} ({devices[rank % len(devices)]}{node})"

    return [[named(rank) for rank in row] for row in rows]


def _stages(
    plan: Plan, module: nn.Module, memory: SameMemory, workers: Sequence[Sequence[str]], name: str
) -> Iterator[str]:
    ownership = assign_owners(module, plan.chain, plan.module_spans, readers=plan.readers, memory=memory)
    for stage, span in enumerate(plan.spans):
        parameters = parameters_held(module, ownership, stage)
        where = [row[stage % len(row)] for row in workers]
        shown = ", ".join(where[:_SHOWN]) + (f" and {len(where) - _SHOWN} more" if len(where) > _SHOWN else "")
        blocks = described(plan.blocks[span.start : span.stop])
        yield f"{name}stage {stage}: {blocks}, {parameters:,} parameters, on {shown}"
    if saves := saves_nothing(module, ownership):
        yield saves


def _where_to_look(strategy: DDPStrategy, options: Options, address: str) -> str:
    if options.standing_scheduler is not None:
        return f"see `sdpipe status {address}`"
    where = "" if strategy.num_nodes == 1 else " on its machine"
    log = "log_dir=… keeps its decisions" if options.scheduler_log is None else f"its log is {options.scheduler_log}"
    return f"{address}, started by rank 0: see `sdpipe status`{where}; {log}"
