"""The process groups of a stage's replicas: one for each epoch of membership, made beside the training.

Making one takes milliseconds, and longer if a member is gone; so threads do it, and the groups of earlier epochs stay
in use meanwhile. gloo can end a wait for a message that a live process will not send in one way only: a receive in
another thread runs into its timeout, which closes all connections of this process in that group. This is done to a
group in which this worker exchanges with a lost worker, or in which an exchange has broken off: a message still on its
way to memory that is let go would hold up all later ones for good. Waits that this does not end, since a connection was
lost in the middle of a message, are left (:mod:`~lightning_sdpipe.exchange.transfers`).

To make a group, replicas find each other through a SchedulerStore, over the scheduler's key-value store. The scheduler
imports no torch, and its connection is encrypted where there are keys. A TCPStore would live and die with one of the
workers, and be open to all that can reach it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.moving import GroupMean
from lightning_sdpipe.membership.members import Epoch, Exchanging, Member
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.topology.groups import Replicas

log = logging.getLogger(__name__)

CONNECTING = timedelta(seconds=20)
"""Time in which all members must connect to make a group."""
KEPT = 3
"""Number of newest epochs whose groups are always kept."""

_TRYING = 4.0  # seconds, to reach all others; the scheduler's next epoch comes after 5
_TRYING_TO_CONNECT = timedelta(seconds=1)  # gloo listens five times as long
_TRIED = 2**16  # elements sent to and fro in a trial: some networks lose large packets only

MakeStore = Callable[[str, Callable[[], bool]], Store]
"""Makes a store of that name that all processes reach; its waits end when the given function returns true."""


@dataclass(frozen=True)
class _OfEpoch:
    replicas: Replicas  # over a gloo group that belongs to no world
    hosts: Mapping[int, str] | None


class EpochGroups:
    """The process groups of one worker.

    Args:
        worker: this worker.
        make_store: see :data:`MakeStore`.
        timeout: that of a transfer, once a group exists.
        report: the client that is told of the groups and exchanges of this worker.
        host: this worker's machine, if machines are told apart; the replicas of an epoch tell each other theirs.
    """

    def __init__(
        self,
        worker: Worker,
        make_store: MakeStore,
        timeout: timedelta,
        report: SchedulerClient,
        host: str | None = None,
    ) -> None:
        self._worker = worker
        self._make_store = make_store
        self._timeout = timeout
        self._report = report
        self._lock = threading.Condition()
        self._host = host
        self._made: dict[int, _OfEpoch] = {}
        self._given_up = -1  # the newest epoch whose group was
        self._epoch: Epoch | None = None  # the newest
        self._starts: dict[int, dict[int, Member]] = {}  # start of each pipeline, by known epoch
        self._in_use: Group | None = None
        self._beside: dict[int, Group] = {}
        """Groups that are used besides ``_in_use``, by sequence."""
        self._closed = False

    def enter(self, epoch: Epoch) -> None:
        """Make the members of ``epoch`` the members from now on. Any thread may call it; it does not wait."""
        with self._lock:
            if epoch.number <= self._newest:
                return
            self._epoch = epoch
            self._starts = {number: self._starts[number] for number in self._starts if number in self._made}
            self._starts[epoch.number] = {member.pipeline: member for member in epoch.members}
            broken = {used.epoch for used in self._used() if self._has_lost(used)}
            self._lock.notify_all()
        present = set(epoch.pipelines)
        for number in broken:
            self._poison(number)
        if self._worker.pipeline in present and len(present) > 1:
            # A thread for each: one that connects to a worker that has gone on to the next epoch waits in vain. The
            # interpreter waits for them at its end: it would abort in one that comes out of gloo while it is torn down.
            name = f"group of epoch {epoch.number}"
            threading.Thread(target=self._make, args=[epoch], name=name).start()
            if epoch.tries:
                threading.Thread(target=self._try, args=[epoch], name=f"trying {name}", daemon=True).start()

    @property
    def held(self) -> list[int]:
        """Epochs for which this worker has a process group."""
        with self._lock:
            return sorted(self._made)

    def mean(self, group: Group) -> GroupMean:
        """Return the mover that averages among the members of ``group`` in full precision; raises as :meth:`replicas`
        does."""
        return GroupMean(self.replicas(group))

    def replicas(self, group: Group) -> Replicas:
        """Return how this worker reaches the members of ``group``.

        Raises:
            WorkerFailedError: a member of the group's epoch is gone, and with it the process group.
        """
        return self._of(group).replicas

    def hosts(self, group: Group) -> Mapping[int, str] | None:
        """Return the machine of each replica in the group's epoch, None if machines are not told apart; raises as
        :meth:`replicas` does."""
        return self._of(group).hosts

    def _of(self, group: Group) -> _OfEpoch:
        pipelines = {member.pipeline for member in group.members}  # one may have come to a barrier, and be gone since
        with self._lock:
            self._lock.wait_for(
                lambda: (
                    group.epoch != self._newest
                    or not pipelines <= self._present()
                    or group.epoch in self._made
                    or group.epoch == self._given_up
                ),
                CONNECTING.total_seconds(),
            )
            made = self._made.get(group.epoch)
        if made is None:
            raise WorkerFailedError(f"the process group of epoch {group.epoch} is not there (any more)")
        if not _holds(made.replicas, group):
            raise WorkerFailedError(
                f"one of pipelines {[member.pipeline for member in group.members]} was lost before epoch "
                f"{group.epoch}, which has {made.replicas.pipelines}"
            )
        return made

    def use(self, group: Group | None) -> None:
        """Set the group in which this worker exchanges from now on, if any."""
        with self._lock:
            self._in_use = group
            made = None if group is None else self._made.get(group.epoch)
            gone = group is not None and self._has_lost(group)
            pipelines = () if group is None else tuple(member.pipeline for member in group.members)
        exchange = None if group is None else Exchanging(group.sequence, pipelines, 0)
        self._report.exchanges(exchange, lambda: 0 if group is None else self._moved(group.epoch))
        if gone and group is not None and made is not None and _holds(made.replicas, group):
            self._poison(group.epoch)

    @contextmanager
    def beside(self, group: Group) -> Iterator[Replicas]:
        """Use ``group`` within the block, besides others that are used at the same time, and give its process group up
        if the exchange in the block breaks off. Any thread may do so.

        Raises:
            WorkerFailedError: a member of the group's epoch is gone, and with it the process group.
        """
        with self._lock:
            self._beside[group.sequence] = group
            gone = self._has_lost(group)
        try:
            if gone:
                raise WorkerFailedError(f"a member of group {group.sequence} is gone since epoch {group.epoch}")
            replicas = self.replicas(group)
            try:
                yield replicas
            except WorkerFailedError:
                self.give_up(group)
                raise
        finally:
            with self._lock:
                del self._beside[group.sequence]

    def _moved(self, number: int) -> int:
        """Return the bytes that the process group of epoch ``number`` has moved."""
        made = self._made.get(number)
        return 0 if made is None or made.replicas.connections is None else made.replicas.connections.moved()

    def give_up(self, group: Group) -> None:
        """Give up the process group of ``group``, in which an exchange has broken off."""
        self._poison(group.epoch)

    def broke(self, sequence: int) -> None:
        """Break off the exchange of the group ``sequence``, whose result another member did not get. Any thread may
        call it."""
        with self._lock:
            used = self._in_use
        if used is not None and used.sequence == sequence:
            self._poison(used.epoch)

    def wait_for_newest(self) -> None:
        """Wait for the group of the newest epoch, which is a moment away: an exchange there will succeed."""
        with self._lock:
            self._lock.wait_for(lambda: self._newest in self._made or len(self._present()) < 2, 1.0)

    def close(self) -> None:
        """Make no more groups."""
        self._closed = True

    @property
    def _is_over(self) -> bool:
        """True if no more groups are needed, since this object was closed or the process ends."""
        return self._closed or not threading.main_thread().is_alive()

    @property
    def _newest(self) -> int:
        return 0 if self._epoch is None else self._epoch.number

    def _used(self) -> list[Group]:
        return [*([] if self._in_use is None else [self._in_use]), *self._beside.values()]

    def _present(self) -> set[int]:
        return {self._worker.pipeline} if self._epoch is None else set(self._epoch.pipelines)

    def _has_lost(self, group: Group) -> bool:
        """Return whether a member of ``group`` has gone since the group's epoch. Another start of its pipeline may be
        in the newest epoch."""
        newest = self._starts.get(self._newest, {})
        then = self._starts.get(group.epoch, newest)
        pipelines = [member.pipeline for member in group.members]
        return any(i not in newest or newest[i] != then.get(i) for i in pipelines)

    def _poison(self, number: int) -> None:
        with self._lock:
            made = self._made.pop(number, None)
            if made is not None:
                self._given_up = max(self._given_up, number)
                self._lock.notify_all()
        if made is not None:
            if made.replicas.connections is not None:
                made.replicas.connections.given_up.set()
            p2p.close_connections(made.replicas.group)
            self._report.holds(self.held)

    def _make(self, epoch: Epoch) -> None:
        own, number = self._worker, epoch.number
        ranks = {pipeline: rank for rank, pipeline in enumerate(epoch.pipelines)}
        store = self._make_store(f"epoch-{number}-{own.stage}", lambda: self._is_over or number != self._newest)
        hosts: dict[int, str] | None = None
        try:
            if self._host is not None:
                store.set(f"host-{own.pipeline}", self._host)
            with p2p.Connections() as connections:
                group: Any = dist.ProcessGroupGloo(store, ranks[own.pipeline], len(ranks), CONNECTING)
            if self._host is not None:
                hosts = {i: store.get(f"host-{i}").decode() for i in epoch.pipelines}
        except Exception as error:  # a later epoch is on its way, or the scheduler, which says so where it is asked
            log.info("the group of epoch %d was not made: %s", number, str(error).splitlines()[0])
            return
        group._set_default_timeout(self._timeout)  # of collectives
        replicas = Replicas(group, ranks, own.stage, own.pipeline, limit=self._timeout, connections=connections)
        made = _OfEpoch(replicas, hosts)
        with self._lock:
            if self._is_over:
                return
            self._made[number] = made
            in_use = {used.epoch for used in self._used()}
            old = [self._made.pop(earlier) for earlier in sorted(self._made)[:-KEPT] if earlier not in in_use]
            self._lock.notify_all()
        self._report.holds(self.held)
        del old

    def _try(self, epoch: Epoch) -> None:
        """Find the workers that this worker can reach: make and use a process group of two with each."""
        number, own = epoch.number, self._worker
        others = {Worker(own.stage, i) for i in epoch.pipelines if i != own.pipeline}
        until = time.monotonic() + _TRYING
        reached: set[Worker] = set()

        def is_over() -> bool:
            return self._closed or number != self._newest or time.monotonic() > until

        def reach(other: Worker) -> None:
            first, second = sorted([own, other])
            pair = f"{first.stage}.{first.pipeline}-{second.stage}.{second.pipeline}"
            store = self._make_store(f"try-{number}-{pair}", is_over)
            try:
                there = int(own < other)
                group: Any = dist.ProcessGroupGloo(store, 1 - there, 2, _TRYING_TO_CONNECT)
                sent = group.send([torch.zeros(_TRIED)], there, 0)
                group.recv([torch.zeros(_TRIED)], there, 0).wait(timedelta(seconds=_TRYING))
                sent.wait(timedelta(seconds=_TRYING))
            except Exception as error:  # on any error they cannot exchange
                log.info("worker %s is not reached: %s", other, str(error).splitlines()[0])
            else:
                reached.add(other)

        threads = [threading.Thread(target=reach, args=[other], daemon=True) for other in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._report.misses(number, {other.pipeline for other in others - reached})


def _holds(replicas: Replicas, group: Group) -> bool:
    return {member.pipeline for member in group.members} <= {*replicas.pipelines}
