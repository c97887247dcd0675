"""Worker's halves of averaging beside training, at its own pace: ``overlap="free"`` (BAGUA §3.2, asynchronous), and
asynchronous AD-PSGD.

With ``overlap="free"`` a worker asks the scheduler for the next average when an interval has passed since the last one,
looks after each of its updates whether the members are known, and gives a copy of its model to a thread, which
averages it. When the thread has the whole mean, the worker adds the difference between the mean and the copy after its
next update. So a gradient is computed on one unchanged model, no worker stands still, and no update is lost. What a
lost member has left unfinished is in no model. A newcomer begins with its donor's model, without what is under way
there.

With asynchronous AD-PSGD a worker averages with a neighbour that goes on computing, on the copies that both have
published. No worker holds a lock while it waits for another one, which excludes deadlock without the bipartite graph of
the paper (Lian et al. 2018).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.background import Background, Job, Overlapped
from lightning_sdpipe.exchange.buckets import PublishedCopy, tensors_of
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import Mover, PairMean, Pending, exchange_whole, finish
from lightning_sdpipe.exchange.references import OwnReference
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import SEGMENT
from lightning_sdpipe.sync.mover_choice import Begin
from lightning_sdpipe.sync.peers import Peers
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer
from lightning_sdpipe.topology.groups import Replicas

log = logging.getLogger(__name__)

MakeMover = Callable[[Replicas], Mover]
_LOST_AFTER = 1.0  # seconds; the sender of an invitation that is lost drops the exchange later


class FreeAveraging(Synchronizer):
    """Averages beside training; see the module's text. Memory: one more model.

    Args:
        replica: this worker.
        mover: moves copies of the models.
        begin: called with the models whenever training begins; then they are equal on all replicas.
    """

    shares_next = True

    def __init__(self, replica: Replica, mover: Mover, begin: Begin | None) -> None:
        super().__init__(replica)
        self._beside = Overlapped(mover, replica.timeout.total_seconds())
        self._begin_with = begin
        self._asked = False
        self._due = 0.0  # time of the next average
        self._number = -1  # of the next average, once it has started

    @property
    def models_averaged(self) -> int:
        return self.replica.count

    @property
    def equal_at_start(self) -> Replicas | None:
        return None if self._begin_with is None else self.replica.parts[0].among

    def start(self) -> None:
        """Begin a segment of training, in which all stages of a pipeline count averages alike. Numbers are larger than
        those of earlier segments: policies remember these, and stages do not end a segment at the same moment."""
        self._number, self._due = (self._number // SEGMENT + 1) * SEGMENT, time.monotonic()
        if self._begin_with is not None:
            self._begin_with(tensors_of(self.replica.exchanged))

    def synchronise(self) -> None:
        """Add the change of an average that has ended, and ask for the next one when it is due. Do not wait."""
        start = time.perf_counter()
        members = 1 if self._beside.waits else self._end()
        if not self._beside.is_under_way:
            if not self._asked and time.monotonic() >= self._due:
                self.replica.client.ready(self._number)
                self._asked, self._number = True, self._number + 1
            if self._asked:
                self._begin(self.replica.client.group_if_known())
        self.statistics.count(members, 0.0, time.perf_counter() - start)

    def settle(self) -> None:
        """End the average that is under way, or whose members have been named, since they count on this worker."""
        if self._asked:
            self._begin(self.replica.client.withdraw())
            self._asked = False
        self._end()

    def _begin(self, group: Group | None) -> None:
        if group is None:
            return
        self._asked = False
        self._beside.begin(tensors_of(self.replica.exchanged, beside=True), group)
        if not self._beside.is_under_way:  # no other member was there
            self._due = time.monotonic() + self.replica.exchange.interval

    def _end(self) -> int:
        """End the average that is under way, if there is one; return its members."""
        members = self._beside.members
        if self._beside.is_under_way:
            self._beside.end()
            self._due = time.monotonic() + self.replica.exchange.interval
        return members


Pairs = Callable[[Group, Callable[[Replicas], Pending]], bool]
"""Exchanges between the two members of a group; the function begins the exchange among given replicas. Returns whether
it was done. Any thread may call it."""


def _piece_by_piece(replicas: Replicas, group: Group, start: Callable[[Replicas], Pending]) -> bool:
    finish(start(replicas))
    return True


def _dropped_or_whole(peers: Peers, group: Group, start: Callable[[Replicas], Pending]) -> bool:
    """Exchange everything, or nothing if the exchange breaks off: then neither member changes its model.

    It is not tried again, since each member averages with another one soon. An exchange takes effect when both members
    have all of it. Only if their connection breaks during the last message about that, while both live, may it take
    effect on one and not on the other.
    """
    try:
        with peers.epochs.beside(group) as replicas:
            limit = timedelta(seconds=peers.client.limit)
            limited = replace(replicas, traffic=peers.traffic, limit=limit)
            exchange_whole(start(limited), group, limited)
    except WorkerFailedError as error:
        log.info("the exchange %d is dropped: %s", group.sequence, str(error).splitlines()[0])
        return False
    return True


class AsynchronousPairs(Synchronizer):
    """After each step, averages with the neighbour that the scheduler names; a thread serves the neighbours that name
    it."""

    shares_next = True

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._published = PublishedCopy([])
        self._lock = threading.Lock()  # guards the published copy
        if replica.peers is not None:
            replica.client.invitations_are_lost_after = _LOST_AFTER
            self._pairs: Pairs = partial(_dropped_or_whole, replica.peers)
        else:
            self._pairs = partial(_piece_by_piece, replica.beside())
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
        return self._pairs(group, lambda replicas: movers(replicas).start(self._published.tensors, group))

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
        self._take_published()  # what was averaged since the last step: start() begins from the model

    def resynchronise(self) -> None:
        if self.replica.peers is None:
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
