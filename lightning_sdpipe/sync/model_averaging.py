"""A worker's half of the rules that average models in groups: SDPipe §3.1, Algorithm 1, step B."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.averaging.buckets import FlatBucket
from lightning_sdpipe.averaging.ring import ring_average
from lightning_sdpipe.scheduler.client import SchedulerClient


@dataclass
class SyncStatistics:
    """What this worker's synchronisation amounted to since the start of training."""

    groups: int = 0
    members: int = 0
    seconds_waiting: float = 0.0
    seconds_averaging: float = 0.0

    @property
    def mean_group_size(self) -> float:
        return self.members / self.groups if self.groups else 0.0


@dataclass
class ModelAveraging:
    """Announces when this worker is ready, learns its group, and averages the stage's parameters with it.

    A worker takes part between :meth:`resume` and :meth:`pause`. All workers of the run must call each of these at the
    same point of training, since both wait for everybody.

    Args:
        client: this worker's line to the scheduler.
        stage_group: the process group of the stage's replicas.
        ranks: global rank of the stage's replica in each pipeline.
        parameters: the stage's parameters.
        buffers: tensors that only a full average makes equal, such as BatchNorm statistics.
    """

    client: SchedulerClient
    stage_group: dist.ProcessGroup
    ranks: Sequence[int]
    parameters: Sequence[FlatBucket]
    buffers: Sequence[Tensor]
    statistics: SyncStatistics = field(default_factory=SyncStatistics)
    _active: bool = False

    def resume(self) -> None:
        """Takes part from now on; returns when every worker of the run does."""
        if not self._active:
            self.client.join()
            self._active = True
            dist.barrier()

    def announce(self, iteration: int) -> None:
        """Tells the scheduler that the last backward of ``iteration`` is under way; does not wait."""
        self.client.ready(iteration)

    def synchronise(self) -> None:
        """Waits for the group that answers :meth:`announce` and averages the parameters with its members."""
        start = time.perf_counter()
        group = self.client.group()
        told = time.perf_counter()
        members = [self.ranks[worker.pipeline] for worker in group.members]
        for bucket in self.parameters:
            bucket.check()
            ring_average(bucket.buffer, members, group.weights, self.stage_group, group.sequence % 2**31)
        self.statistics.groups += 1
        self.statistics.members += len(members)
        self.statistics.seconds_waiting += told - start
        self.statistics.seconds_averaging += time.perf_counter() - told

    def pause(self) -> None:
        """Stops taking part, and makes all replicas of the stage equal: parameters and floating-point buffers become
        their mean over the pipelines, integer buffers (counters) the largest."""
        if self._active:
            self.client.leave()
            self._active = False
            self._average_all()

    def _average_all(self) -> None:
        for bucket in self.parameters:
            bucket.check()
            _mean(bucket.buffer, self.stage_group)
        for buffer in self.buffers:
            if torch.is_floating_point(buffer):
                _mean(buffer, self.stage_group)
            else:
                dist.all_reduce(buffer, dist.ReduceOp.MAX, group=self.stage_group)


def _mean(tensor: Tensor, group: dist.ProcessGroup) -> None:
    tensor.div_(dist.get_world_size(group))
    dist.all_reduce(tensor, group=group)
