"""Worker's half of asynchronous AD-PSGD: it averages with a neighbour that goes on computing.

Every worker publishes its model: a copy that others may average with at any time. No worker holds a lock while it waits
for another one, which excludes deadlock without the bipartite graph of the paper (Lian et al. 2018). A gradient is
computed on one unchanged model; its update is added to the published copy when it is ready.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.background import Background, Job
from lightning_sdpipe.exchange.buckets import PublishedCopy
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import Mover, PairMean, Pending, finish
from lightning_sdpipe.exchange.own_reference import OwnReference
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer
from lightning_sdpipe.topology.groups import Replicas

MakeMover = Callable[[Replicas], Mover]
_LOST_AFTER = 1.0  # seconds; the sender of an invitation that is lost drops the exchange later


class AsynchronousPairs(Synchronizer):
    """After each step, averages with the neighbour that the scheduler names; a thread serves the neighbours that name
    it."""

    serves = shares_next = True

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._published = PublishedCopy([])
        self._lock = threading.Lock()  # guards the published copy
        self._pairs = replica.pairs
        self._replicas: Replicas | None = None
        if self._pairs is not None:
            replica.client.invitations_are_lost_after = _LOST_AFTER
        else:
            self._replicas = replica.groups.replicas(replica.groups.side_channel(replica.timeout))
        self._asks, self._answers = self._movers(), self._movers()
        self._dropped = 0
        """Exchanges of this worker that were dropped and are not taken off the statistics yet."""
        seconds = replica.timeout.total_seconds()
        self._background = Background("averaging with a neighbour", 2 * seconds)
        self._job: Job | None = None
        self._invitations: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._iteration = 0
        replica.client.on_invitation = lambda group, after: self._invitations.put(group)

    @property
    def models_averaged(self) -> float:
        """See the base class."""
        return self.replica.count

    def announce(self, iteration: int) -> None:
        """Do not ask the scheduler yet: a neighbour's thread would serve no other until the backward has ended."""
        self._iteration = iteration

    def synchronise(self) -> None:
        """Publish the update, average with the neighbour, and take over the published model.

        Raises:
            WorkerFailedError: a neighbour failed, now or while it averaged with this worker. Where pipelines come and
                go, such an exchange is dropped instead.
        """
        start = time.perf_counter()
        self._settle()
        self.replica.client.ready(self._iteration)
        group = self.replica.client.group()
        told = time.perf_counter()
        if self._failure is not None:
            raise self._failure
        self._publish()
        if len(group.members) > 1:
            if self.replica.exchange.overlap == "step":
                self._job = self._background.do(lambda: self._ask(group))
            else:
                self._ask(group)
        self._take_published()
        self.statistics.count(len(group.members), told - start, time.perf_counter() - told)
        if self._job is None:
            self._take_off_dropped()

    def _ask(self, group: Group) -> None:
        self._dropped += not self._exchange(self._asks, group)

    def _exchange(self, movers: MakeMover, group: Group) -> bool:
        def start(replicas: Replicas) -> Pending:
            return movers(replicas).start(self._published.tensors, group)

        if self._pairs is not None:
            return self._pairs(group, start)
        assert self._replicas is not None
        finish(start(self._replicas))
        return True

    def _settle(self) -> None:
        """Wait for the exchange that this worker asked for, if one goes on beside training."""
        if self._job is not None:
            job, self._job = self._job, None
            job.wait()
            self._take_off_dropped()

    def _take_off_dropped(self) -> None:
        self.statistics.members -= self._dropped
        self._dropped = 0

    def _movers(self) -> MakeMover:
        """Return a factory of movers. One serves exchanges that this worker asks for and another those that neighbours
        ask for, which may go on at the same time."""
        if self.replica.exchange.is_full:
            return lambda replicas: PairMean(replicas, self._lock)
        coding = OwnReference(self.replica.exchange.payload)
        return lambda replicas: EncodedMean(replicas, coding, lock=self._lock)

    def start(self) -> None:
        self._published = PublishedCopy(self.replica.exchanged)
        self._thread = threading.Thread(target=self._serve, name="AD-PSGD averaging", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is None:
            return
        self._settle()
        self._invitations.put(None)  # the client has heard of all invitations when it has left
        self._thread.join(self.replica.timeout.total_seconds())
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise WorkerFailedError(
                f"the neighbours of stage {self.replica.stage} did not finish averaging with pipeline "
                f"{self.replica.pipeline} within {self.replica.timeout.total_seconds():g} s"
            )
        self._thread = None
        self._publish()
        self._take_published()  # what was averaged since the last step: enter() begins from the model

    def resynchronise(self) -> None:
        if self._pairs is None:
            self.make_parameters_equal()

    def make_parameters_equal(self) -> None:
        self._publish()
        self._take_published()
        super().make_parameters_equal()

    def _publish(self) -> None:
        with self._lock:
            self._published.add_step()

    def _take_published(self) -> None:
        with self._lock:
            self._published.take()

    def _serve(self) -> None:
        while (group := self._invitations.get()) is not None:
            try:
                self._exchange(self._answers, group)
            except Exception as error:  # raised where the training next asks; a thread could only print it
                self._failure = error
                return
