"""What every worker's half of a synchronisation method has in common, and what the strategy calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.averaging.buckets import FlatBucket
from lightning_sdpipe.groups import ProcessGroups
from lightning_sdpipe.pipeline.gradients import GradientExchange
from lightning_sdpipe.scheduler.client import SchedulerClient
from lightning_sdpipe.scheduler.specification import PolicySpec


@dataclass
class SyncStatistics:
    """What this worker's synchronisation amounted to since the start of training.

    ``groups`` counts the updates, ``members`` the workers that took part in each, this one included.
    ``seconds_waiting`` is what this worker stood still until the others of its group were there,
    ``seconds_averaging`` what it stood still while tensors moved; what is hidden behind computation counts in neither.
    """

    groups: int = 0
    members: int = 0
    seconds_waiting: float = 0.0
    seconds_averaging: float = 0.0

    @property
    def mean_group_size(self) -> float:
        return self.members / self.groups if self.groups else 0.0

    def count(self, members: int, seconds_waiting: float = 0.0, seconds_averaging: float = 0.0) -> None:
        """Counts one update."""
        self.groups += 1
        self.members += members
        self.seconds_waiting += seconds_waiting
        self.seconds_averaging += seconds_averaging


@dataclass(frozen=True)
class Replica:
    """A worker as one of the replicas of its stage: what a :class:`Synchronizer` works with."""

    client: SchedulerClient
    groups: ProcessGroups
    parameters: Sequence[FlatBucket]
    buffers: Sequence[Tensor]  # that only a full average makes equal, such as BatchNorm statistics
    trained: Sequence[nn.Parameter]  # in the order by which the pipeline numbers their gradients
    timeout: timedelta  # of every wait

    @property
    def stage(self) -> int:
        return self.groups.mesh.locate(self.groups.rank)[0]

    @property
    def pipeline(self) -> int:
        return self.groups.mesh.locate(self.groups.rank)[1]

    @property
    def ranks(self) -> Sequence[int]:
        """Global rank of the stage's replica in each pipeline."""
        return self.groups.mesh.stage_ranks(self.stage)


class Synchronizer:
    """A worker's half of a synchronisation method. This one never synchronises, except at :meth:`pause`.

    For every update of the parameters the strategy calls :meth:`announce`, when the last backward is under way, and
    :meth:`synchronise`, when the optimizer has stepped. A method that averages gradients offers ``gradients`` to the
    pipeline, which tells it of every gradient that the backward completes, and waits for the means before it ends.

    A worker takes part between :meth:`resume` and :meth:`pause`. All workers of the run must call each of these at the
    same point of training, since both wait for everybody; the numbers of updates in between may differ.
    """

    gradients: GradientExchange | None = None
    """Averages gradients while the backward runs; None if the method leaves them alone."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.statistics = SyncStatistics()
        self._active = False

    @property
    def models_averaged(self) -> float:
        """How many models, each trained on gradients of its own, are averaged after an update, in the mean."""
        return 1.0

    def resume(self) -> None:
        """Takes part from now on; returns when every worker of the run does."""
        if not self._active:
            self.replica.client.join()
            self._active = True
            self._enter()
            dist.barrier()

    def announce(self, iteration: int) -> None:
        """The last backward of update ``iteration`` is under way. Does not wait."""

    def synchronise(self) -> None:
        """The optimizer has stepped. Returns when the next iteration may start."""
        self.statistics.count(members=1)

    def pause(self) -> None:
        """Stops taking part, and makes all replicas of the stage equal: floating-point buffers become their mean over
        the pipelines, integer buffers (counters) the largest, and so do parameters, unless the method knows better."""
        if self._active:
            self.replica.client.leave()
            self._active = False
            self._make_parameters_equal()
            self._average_buffers()

    def _enter(self) -> None:
        """What else :meth:`resume` does before it waits for everybody."""

    def _make_parameters_equal(self) -> None:
        for bucket in self.replica.parameters:
            bucket.check()
            _mean(bucket.buffer, self.replica.groups.stage)

    def _average_buffers(self) -> None:
        for buffer in self.replica.buffers:
            if torch.is_floating_point(buffer):
                _mean(buffer, self.replica.groups.stage)
            else:
                dist.all_reduce(buffer, dist.ReduceOp.MAX, group=self.replica.groups.stage)


@runtime_checkable
class SyncMethod(Protocol):
    """What ``SDPipeStrategy(sync=...)`` takes: the values of a method, which build each worker's half of it."""

    @property
    def policy(self) -> PolicySpec:
        """What the scheduler decides for it."""

    def build(self, replica: Replica) -> Synchronizer:
        """This worker's half. Every worker of the run must call it at the same point."""


def _mean(tensor: Tensor, group: dist.ProcessGroup) -> None:
    tensor.div_(dist.get_world_size(group))
    dist.all_reduce(tensor, group=group)
