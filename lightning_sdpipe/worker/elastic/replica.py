"""A worker as one of the replicas of its stage in an elastic run: its rendezvous with the others, and exchanges that
survive their members. When one is lost, the members that are left go on with the models that they have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange.moving import Mover, Pending, exchange_whole
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.sync.rendezvous import Rendezvous, SyncPoint
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer
from lightning_sdpipe.topology.groups import Replicas, Traffic
from lightning_sdpipe.worker.elastic.barriers import Barriers
from lightning_sdpipe.worker.elastic.epoch_process_groups import EpochGroups

log = logging.getLogger(__name__)


class Surviving:
    """The weighted mean over a group, by the mover of its epoch. A group that breaks off is no group: what was taken
    over stays, since these pieces are means of models that existed, and the rest of the model stays as it is.

    Args:
        epochs: the groups of the replicas of this worker.
    """

    def __init__(self, epochs: EpochGroups) -> None:
        self._epochs = epochs

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """Start the exchange; see :class:`~lightning_sdpipe.exchange.moving.Mover`."""
        return _Surviving(tensors, group, self._epochs)


class _Surviving:
    def __init__(self, tensors: Sequence[Tensor], group: Group, epochs: EpochGroups) -> None:
        self.seconds_waiting = 0.0
        self._group, self._epochs = group, epochs
        self._inner: Pending | None = None
        if len(group.members) < 2:
            return
        epochs.use(group)
        mover: Mover | None = None
        try:
            mover = epochs.exchange(group)
            self._inner = mover.start(tensors, group)
        except WorkerFailedError as error:
            self._drop(error, has_begun=mover is not None)

    def wait(self) -> bool:
        if self._inner is None:
            return False
        try:
            goes_on = self._inner.wait()
        except WorkerFailedError as error:
            self.seconds_waiting = self._inner.seconds_waiting
            self._drop(error, has_begun=True)
            return False
        self.seconds_waiting = self._inner.seconds_waiting
        if not goes_on:
            self._inner = None
            self._epochs.use(None)
        return goes_on

    def commit(self) -> None:
        assert self._inner is not None
        self._inner.commit()

    def abort(self) -> None:
        if self._inner is not None:
            self._inner.abort()
            self._inner = None
        self._epochs.use(None)

    def _drop(self, error: WorkerFailedError, has_begun: bool) -> None:
        log.info("the exchange %d has broken off: %s", self._group.sequence, str(error).splitlines()[0])
        if has_begun:
            self._epochs.give_up(self._group)
        self.abort()


class DroppedPairs:
    """Exchanges of pairs beside training, which are dropped when they break off: neither member changes its model then.

    They are not tried again, since each member averages with another one soon. An exchange is taken over when both
    members have all of it. Only if their connection breaks in the last word about that, while both live, one may take
    it over and the other not.

    Args:
        epochs: the groups of the replicas of this worker.
        client: says how long a transfer may stand still.
        traffic: counts the bytes that this worker sends.
    """

    def __init__(self, epochs: EpochGroups, client: SchedulerClient, traffic: Traffic) -> None:
        self._epochs, self._client, self._traffic = epochs, client, traffic

    def run(self, group: Group, start: Callable[[Replicas], Pending]) -> bool:
        """Exchange; see :class:`~lightning_sdpipe.sync.synchronizer.ExchangeOfPair`."""
        try:
            with self._epochs.beside(group) as replicas:
                limit = timedelta(seconds=self._client.limit)
                limited = replace(replicas, traffic=self._traffic, limit=limit)
                exchange_whole(start(limited), group, limited)
        except WorkerFailedError as error:
            log.info("the exchange %d is dropped: %s", group.sequence, str(error).splitlines()[0])
            return False
        return True


class ElasticRendezvous(Rendezvous):
    """The rendezvous of one worker. It waits for no other when it sets out: a worker that comes later finds its groups
    then."""

    def __init__(self, sync: Synchronizer, barriers: Barriers) -> None:
        super().__init__(sync)
        self._barriers = barriers

    def wait_for_others(self, position: int, steps: int = 0) -> SyncPoint:
        """Raise an error, since data are dealt, and no pipeline runs out of its own."""
        raise ConfigurationError("In an elastic run data are dealt, so no pipeline runs out of its own.")

    def _meet_others(self, position: int, steps: int) -> None:
        self._barriers.meet()

    def _leave(self) -> None:
        if not self._sync.serves:
            self._sync.stop()
        super()._leave()

    def _set_out(self) -> None:
        self._barriers.set_out()
        self.rejoin()


@dataclass(frozen=True)
class ElasticReplica(Replica):
    """A replica in an elastic run; see :class:`~lightning_sdpipe.sync.synchronizer.Replica`."""

    barriers: Barriers = field(kw_only=True)
    present: Callable[[], int] = field(kw_only=True)  # number of pipelines
    forget: Callable[[], None] = field(kw_only=True, default=lambda: None)  # what members of groups have in common

    @property
    def count(self) -> int:
        return self.present()

    def average(self, tensors: Sequence[Tensor]) -> None:
        self.forget()
        self.barriers.average(tensors)

    def average_buffers(self) -> None:
        self.barriers.average(self.buffers)
