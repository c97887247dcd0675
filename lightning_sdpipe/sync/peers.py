"""The other replicas of a worker's stage where pipelines come and go, and exchanges of models that survive the loss of
members: those that are left go on with the models that they have."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.moving import Mover, Pending
from lightning_sdpipe.meter import Traffic
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.sync.barriers import Barriers
from lightning_sdpipe.sync.epoch_process_groups import EpochGroups
from lightning_sdpipe.topology.groups import Replicas

log = logging.getLogger(__name__)

_LOST_AFTER = 1.0
"""Seconds after which an invitation to hand something over is not waited for any more; the others ask again."""

MakeMover = Callable[[Replicas, Mapping[int, str] | None], Mover]
"""Makes a mover among replicas, of which the machine of each pipeline is known where it matters."""


@dataclass
class Peers:
    """The present replicas of one worker's stage, and the ways to reach them."""

    worker: Worker
    client: SchedulerClient
    """The client of the scheduler, which is asked after a failure."""
    epochs: EpochGroups
    """Process groups of the replicas."""
    barriers: Barriers
    """Barriers at which they meet."""
    on_any_stage: Callable[[bool], bool]
    """Returns whether something is true on any stage of this pipeline; every stage asks at the same point."""
    traffic: Traffic
    """Counts the bytes that this worker sends in exchanges."""
    forget: Callable[[], None] = lambda: None
    """Forgets what the members of groups have in common, when models have been made equal."""

    @property
    def count(self) -> int:
        """Number of present replicas, this worker included."""
        return max(1, len(self.client.epoch.members))

    def giver(self, group: Group) -> Replicas:
        """Return how this worker reaches the source of ``group``, which may not have heard that it is to hand something
        over, if the scheduler died before telling it. So its silence is waited out only briefly, and the others ask
        again.

        Raises:
            WorkerFailedError: a member of the group's epoch is gone, and with it the process group.
        """
        limit = timedelta(seconds=self.client.limit)
        return replace(self.epochs.replicas(group), traffic=self.traffic, limit=limit)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Make ``tensors`` the mean over all replicas, which are together; integers (counters) become the largest."""
        self.forget()
        self.barriers.average(tensors)


def gives_outcomes(
    client: SchedulerClient, give: Callable[[Group, Replicas], None], reach: Callable[[Group], Replicas]
) -> None:
    """Let ``give`` send, beside the training, what this worker hands over to the other members of a group, which
    ``reach`` returns; both raise WorkerFailedError if one of them is gone."""

    def hand(group: Group) -> None:
        try:
            give(group, reach(group))
        except WorkerFailedError as error:  # members that did not get it are ready again
            log.info("what group %d hands over was not taken: %s", group.sequence, str(error).splitlines()[0])

    client.invitations_are_lost_after = _LOST_AFTER
    client.on_invitation = lambda group, after: threading.Thread(
        target=hand, args=[group], name="handing over", daemon=True
    ).start()


class Surviving:
    """The weighted mean over a group, by a mover of its epoch. If the exchange breaks off, the pieces that were taken
    over stay, since they are means of models that existed, and the rest of the model stays as it is.

    Args:
        peers: the replicas.
        make: makes a mover among those of an epoch.
    """

    def __init__(self, peers: Peers, make: MakeMover) -> None:
        self._peers, self._make = peers, make
        self._made: tuple[Replicas, Mover] | None = None
        """The mover among the replicas of an epoch, for its other groups."""

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """Start the exchange; see :class:`~lightning_sdpipe.exchange.moving.Mover`."""
        return _Surviving(tensors, group, self._peers.epochs, self._mover)

    def _mover(self, group: Group) -> Mover:
        replicas, hosts = self._peers.epochs.replicas(group), self._peers.epochs.hosts(group)
        if self._made is None or self._made[0] is not replicas:
            self._made = replicas, self._make(replace(replicas, traffic=self._peers.traffic), hosts)
        return self._made[1]


class _Surviving:
    def __init__(
        self, tensors: Sequence[Tensor], group: Group, epochs: EpochGroups, find: Callable[[Group], Mover]
    ) -> None:
        self.seconds_waiting = 0.0
        self._group, self._epochs = group, epochs
        self._inner: Pending | None = None
        if len(group.members) < 2:
            return
        epochs.use(group)
        mover: Mover | None = None
        try:
            mover = find(group)
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
