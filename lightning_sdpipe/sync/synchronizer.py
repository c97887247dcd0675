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
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.groups import ProcessGroups
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.pipeline.gradients import GradientExchange
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler.client import SchedulerClient
from lightning_sdpipe.sync.meeting import Meeting, meet


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
    parameters: Sequence[FlatBucket]  # like `trained`, it may change while nobody takes part
    buffers: Sequence[Tensor]  # that only a full average makes equal, such as BatchNorm statistics
    trained: Sequence[nn.Parameter]  # in the order by which the pipeline numbers their gradients
    timeout: timedelta  # of every wait
    watch: bool = True  # end the run when gradients of one replica are not finite, rather than average them

    @property
    def stage(self) -> int:
        return self.groups.mesh.locate(self.groups.rank)[0]

    @property
    def pipeline(self) -> int:
        return self.groups.mesh.locate(self.groups.rank)[1]

    @property
    def device(self) -> torch.device:
        """Of the stage's tensors."""
        return self.parameters[0].buffer.device if self.parameters else torch.device("cpu")

    @property
    def ranks(self) -> Sequence[int]:
        """Global rank of the stage's replica in each pipeline."""
        return self.groups.mesh.stage_ranks(self.stage)


class Synchronizer:
    """A worker's half of a synchronisation method. This one never synchronises, except at :meth:`pause`.

    For every update of the parameters the strategy calls :meth:`announce`, when it waits for no other stage any more,
    and :meth:`synchronise`, when the optimizer has stepped. A method that averages gradients offers ``gradients`` to
    the pipeline, which tells it of every gradient that the backward completes, and waits for the means before it ends.

    A worker takes part from :meth:`resume` on, until it meets the others (:meth:`come_together`, :meth:`pause`) or
    runs out of data (:meth:`sit_out`). All workers of a stage meet at the same points of training, which are told by
    ``position``, the batches that were begun in this epoch; the numbers of updates in between may differ.
    """

    gradients: GradientExchange | None = None
    """Averages gradients while the backward runs; None if the method leaves them alone."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.statistics = SyncStatistics()
        self.announced = False
        """Has this worker been announced and not fetched its group yet?"""
        self._active = False  # the scheduler counts on this worker
        self._apart = False  # the others may be elsewhere
        self._unequal = False  # somebody has trained since the last pause
        self._agreed: int | None = None  # where this worker, which is out of data, will be together with the others

    @property
    def together(self) -> bool:
        """Are all workers of the stage at the same point of training, and outside of the scheduler's groups?"""
        return not self._apart

    @property
    def models_averaged(self) -> int:
        """The mean of how many models, each trained on gradients of its own, is what this method trains.

        All of the stage's when groups are averaged, however small they are: averaging in a group leaves the mean of all
        where it is, and every update moves it.
        """
        return 1

    def resume(self) -> None:
        """Takes part from now on; returns when every worker of the stage does."""
        if not self._active:
            if self._unequal:  # all came together, but not for a pause
                self._catch_up()
            self._join()
            self._barrier()  # nobody's first group may miss one that has not joined yet
            self._apart = self._unequal = True

    def sit_out(self, position: int) -> Meeting:
        """Waits, without holding up anybody, until the others meet somewhere or are all out of data themselves.

        In the latter case everybody takes part again for its last batch.
        """
        self.resume()
        self._leave()
        meeting = meet(position, True, self.replica.groups.stage, self.replica.device)
        if meeting.closing:
            self._catch_up()
            self._join()
            self._barrier()
        else:
            self._agreed = meeting.position
        return meeting

    def come_together(self, position: int) -> None:
        """Waits until all workers of the stage are here. Nobody waits in the scheduler for one that waits here.

        Raises:
            ConfigurationError: this worker has been announced, so that others may count on it; or they met elsewhere.
        """
        if not self._apart:
            return
        if self.announced:
            raise ConfigurationError(
                "Something communicates with the other pipelines between the backward pass and the optimizer step, "
                "where groups are being formed. Do it in on_train_batch_end, or before the backward pass."
            )
        self._leave()
        if self._agreed != position:
            meet(position, False, self.replica.groups.stage, self.replica.device)
        self._apart, self._agreed = False, None

    def pause(self, position: int) -> None:
        """Comes together and makes all replicas of the stage equal: floating-point buffers become their mean over the
        pipelines, integer buffers (counters) the largest, and so do parameters, unless the method knows better."""
        self.come_together(position)
        if self._unequal:
            self._unequal = False
            with waiting_for(self.replica.groups.stage, "averaging"):
                self._make_parameters_equal()
                self._average_buffers()

    def abandon(self) -> None:
        """Training has failed: there is nobody to meet any more."""
        self._active = self._apart = self._unequal = self.announced = False

    def announce(self, iteration: int) -> None:
        """Nothing but this worker's own computing can hold up update ``iteration`` any more. Does not wait."""

    @property
    def shares_next(self) -> bool:
        """Will :meth:`synchronise` give this worker's model to others?"""
        return False

    def synchronise(self) -> None:
        """The optimizer has stepped. Returns when the next iteration may start."""
        self.statistics.count(members=1)

    def _join(self) -> None:
        self.replica.client.join()
        self._active = True
        self._enter()

    def _leave(self) -> None:
        if self._active:
            self.replica.client.leave()
            self._active = False
            self._arrive()

    def _barrier(self) -> None:
        with waiting_for(self.replica.groups.stage, "setting out"):
            dist.barrier(self.replica.groups.stage)

    def _enter(self) -> None:
        """What else :meth:`resume` does before it waits for everybody."""

    def _arrive(self) -> None:
        """What else a worker does that stops taking part, while others may train on."""

    def _catch_up(self) -> None:
        """What all workers, which are together, do before they take part again without a pause in between."""

    def _make_parameters_equal(self) -> None:
        for bucket in self.replica.parameters:
            bucket.check()
            if bucket.trains or torch.is_floating_point(bucket.buffer):  # quantised ones have not changed
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
    def policy(self) -> PolicyConfig:
        """What the scheduler decides for it."""

    def build(self, replica: Replica) -> Synchronizer:
        """This worker's half. Every worker of the run must call it at the same point."""


def _mean(tensor: Tensor, group: dist.ProcessGroup) -> None:
    tensor.div_(dist.get_world_size(group))
    dist.all_reduce(tensor, group=group)
