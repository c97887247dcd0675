"""A worker's half of the rules that average models in groups: SDPipe §3.1, Algorithm 1, step B."""

from __future__ import annotations

import time

from lightning_sdpipe.averaging.group_average import group_average
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer


class ModelAveraging(Synchronizer):
    """Announces when this worker is ready, learns its group, and averages the stage's parameters with it.

    Args:
        replica: this worker.
        every: the scheduler is asked in the updates that this number divides; the others are local.
    """

    def __init__(self, replica: Replica, every: int = 1) -> None:
        super().__init__(replica)
        self._every = every

    @property
    def models_averaged(self) -> int:
        """See the base class."""
        return len(self.replica.ranks)

    def announce(self, iteration: int) -> None:
        """Tells the scheduler that this worker is ready; see the base class."""
        if self._active and iteration % self._every == 0:
            self.replica.client.ready(iteration)
            self.announced = True

    @property
    def shares_next(self) -> bool:
        """See the base class."""
        return self.announced

    def synchronise(self) -> None:
        """Learns the group that answers :meth:`announce` and averages the parameters with its members, whose last
        backwards may still be under way."""
        if not self.announced:
            self.statistics.count(members=1)
            return
        start = time.perf_counter()
        group = self.replica.client.group()
        self.announced = False
        waited = time.perf_counter() - start
        members = [self.replica.ranks[worker.pipeline] for worker in group.members]
        tag = group.sequence % 2**31
        for number, bucket in enumerate(bucket for bucket in self.replica.parameters if bucket.trains):
            bucket.check()
            came = group_average(bucket.buffer, members, group.weights, self.replica.groups.stage, tag)
            if number == 0:  # after its first piece all members are there
                waited += came
        self.statistics.count(len(members), waited, time.perf_counter() - start - waited)
