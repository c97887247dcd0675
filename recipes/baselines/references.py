"""Outside references: Lightning's own DDP, and bare ``torch.distributed.pipelining`` with an all-reduce.

Of this project, they use only the emulated blocks and the injected delays. A worker sleeps at the start of an
iteration, as with :class:`~lightning_sdpipe.SDPipeStrategy`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import DelayInjector, Delays
from recipes.harness.processes import TRANSFER_TIMEOUT, run_processes
from recipes.suites.emulated import FEATURES, LEARNING_RATE, EmulatedChain, passes
from recipes.suites.probe import Report, used_now
from recipes.suites.stages import CPU
from recipes.suites.trainings import EMULATED, Training, train

TIMEOUT_SECONDS = 600.0
REFERENCES = ("lightning_ddp", "bare_torch")


def only_delays(case: Training, leave_out: str) -> Delays:
    """Return the delays of an outside reference, which can sleep only before the forward of a mini-batch.

    Args:
        case: the reference's training.
        leave_out: tells users how to leave the reference out.

    Raises:
        ConfigurationError: the case has real compute, stages that the reference lacks, or another heterogeneity.
    """
    name, slowness = case.method.name, case.slowness
    if case.workload is not EMULATED:
        raise ConfigurationError(f"{name} is only measured with emulated compute; {leave_out}")
    if name == "lightning_ddp" and case.num_stages != 1:
        raise ConfigurationError(f"lightning_ddp has no stages, and {case.num_stages} are asked for; {leave_out}")
    if not isinstance(slowness, Delays) or slowness.draws != "iteration":
        raise ConfigurationError(
            f"{name} can only be delayed once per iteration, which is not what suite.heterogeneity."
            f"{case.condition.name} asks; {leave_out}"
        )
    return slowness


def lightning_ddp() -> DDPStrategy:
    """Return the strategy as a user would make it, with forked processes, as ours."""
    return DDPStrategy(start_method="fork", process_group_backend="gloo")


def train_reference(case: Training) -> list[Report]:
    """Train a case whose method is one of :data:`REFERENCES`."""
    delays, seconds = only_delays(case, "leave it out."), case.block_seconds * case.scale
    if case.method.name == "lightning_ddp":
        probe = {"delays": delays, "compute_seconds": case.num_micro_batches * seconds}
        return train(case, strategy=lightning_ddp(), probe=probe)
    return run_processes(case.workers, _train, case, passes(seconds), delays, timeout=TIMEOUT_SECONDS)


def _train(rank: int, case: Training, seconds: tuple[float, float], delays: Delays) -> Report:
    """Train emulated blocks in torch's 1F1B, with the gradients all-reduced over each stage before each step."""
    num_stages, num_pipelines, num_micro_batches = case.num_stages, case.num_pipelines, case.num_micro_batches
    assert isinstance(num_stages, int)
    pipeline, stage = divmod(rank, num_stages)  # torch wants stage j on rank j; ours are in reverse
    own_pipeline = _group([range(i * num_stages, (i + 1) * num_stages) for i in range(num_pipelines)], pipeline)
    own_stage = _group([range(j, dist.get_world_size(), num_stages) for j in range(num_stages)], stage)
    block = EmulatedChain(num_stages, *seconds, case.block_parameters).blocks[stage]
    features, sent = torch.empty(1, FEATURES), torch.empty(1, FEATURES, requires_grad=True)
    runner = PipelineStage(
        block, stage, num_stages, CPU, input_args=features if stage == 0 else sent, output_args=sent, group=own_pipeline
    )
    schedule = Schedule1F1B(runner, num_micro_batches, loss_fn=lambda output, _: output.mean())
    optimizer = torch.optim.SGD(block.parameters(), LEARNING_RATE)
    injector = DelayInjector(delays, stage, pipeline)
    batch = torch.rand(num_micro_batches, FEATURES, generator=torch.Generator().manual_seed(pipeline))
    inputs, target = (batch,) if stage == 0 else (), batch if stage == num_stages - 1 else None
    report, averaging = Report(stage, pipeline), 0.0
    for iteration in range(case.iterations):
        optimizer.zero_grad()
        injector.before_forward(iteration)
        schedule.step(*inputs, target=target, return_outputs=False)
        start = time.perf_counter()
        for parameter in block.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=own_stage)
            parameter.grad.div_(num_pipelines)
        averaging += time.perf_counter() - start
        optimizer.step()
        done = iteration + 1
        used = used_now(time.perf_counter(), injector)._replace(averaging=averaging, groups=done)
        computed = done * num_micro_batches * sum(seconds)  # the emulated time, since torch does not measure it
        report.readings.append(used._replace(computed=computed, members=done * num_pipelines))
    return report


def _group(all_ranks: Sequence[Sequence[int]], own: int) -> Any:
    """Make all groups, as every rank must, and return this rank's."""
    return [dist.new_group(list(ranks), timeout=TRANSFER_TIMEOUT) for ranks in all_ranks][own]
