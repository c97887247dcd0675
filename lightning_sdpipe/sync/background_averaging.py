"""Worker's halves of averaging at its own pace, beside training: ``overlap="free"`` (BAGUA §3.2, asynchronous).

In an ordinary run a thread of each worker takes part in one average after the other, with an interval between them,
whatever the training does. It works on what the worker publishes: a copy of its model, to which each update is added
when it is ready, and to which the thread adds the difference between the mean and the sent model. So a gradient is
computed on one unchanged model, no worker stands still, and no update is lost. A lock is held for the copy and the sums
only.

All threads average the same number of times: each begins an average by saying whether its worker has arrived at a sync
point, and they end together when all have.

In an elastic run replicas come and go, so the scheduler names the members of each average. The worker asks for the next
one when an interval has passed, looks after each of its updates whether it is known, and gives a copy of its model to a
thread, which averages it. When the thread has the whole mean, the worker adds the difference between the mean and the
copy after its next update. If a member dies, the thread begins again, with those that are left; nothing of it is in any
model until then. A newcomer begins with its donor's model, without what is under way there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.background import Overlapped, turn_into_changes
from lightning_sdpipe.exchange.buckets import PublishedCopy, tensors_of
from lightning_sdpipe.exchange.moving import Mover
from lightning_sdpipe.p2p import labelled, waiting_for
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.sync.mover_choice import Begin
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer
from lightning_sdpipe.topology.groups import Replicas


class BackgroundAveraging(Synchronizer):
    """Averages beside training. Memory: three further models.

    Args:
        replica: this worker.
        mover: moves the published models.
        meet: the members that this worker averages with in a round; asked with a group of all, whose sequence is the
            round.
        begin: called with the models whenever training begins; then they are equal on all replicas.
    """

    shares_next = True

    def __init__(self, replica: Replica, mover: Mover, meet: Callable[[Group], Group], begin: Begin | None) -> None:
        super().__init__(replica)
        self._mover = mover
        self._meet = meet
        self._begin = begin
        self._channel = replica.groups.side_channel(replica.timeout)
        self._lock = threading.Lock()  # guards the published copy
        self._published = PublishedCopy([])
        self._thread: threading.Thread | None = None
        self._arrived = threading.Event()
        self._failure: BaseException | None = None
        self._number = 0  # number of the next round, equal on all workers
        self._members = 1  # members of the last average, which has not been counted yet

    @property
    def models_averaged(self) -> int:
        """See the base class."""
        return len(self.replica.ranks)

    @property
    def equal_at_start(self) -> Replicas | None:
        """See the base class."""
        return None if self._begin is None else self.replica.groups.replicas()

    def synchronise(self) -> None:
        """Publish the update, and take over the changes that averages have made.

        Raises:
            WorkerFailedError: another worker failed while it averaged with this one.
        """
        if self._failure is not None:
            raise self._failure
        start = time.perf_counter()
        with self._lock:
            members, self._members = self._members, 1
            self._published.add_step()
            self._published.take()
        self.statistics.count(members, 0.0, time.perf_counter() - start)

    def start(self) -> None:
        self._published = PublishedCopy(self.replica.exchanged)
        if self._begin is not None:
            self._begin(self._published.tensors)
        self._arrived.clear()
        self._thread = threading.Thread(target=self._run, name="averaging freely", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait until all workers have arrived."""
        assert self._thread is not None
        self._arrived.set()
        self._thread.join(2 * self.replica.timeout.total_seconds())
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise WorkerFailedError(
                f"the replicas of stage {self.replica.stage} did not stop averaging with pipeline "
                f"{self.replica.pipeline} within {2 * self.replica.timeout.total_seconds():g} s"
            )
        self._published.take()

    def resynchronise(self) -> None:
        self.make_parameters_equal()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self._go_through_rounds()
        except BaseException as error:  # raised where the training next asks; a thread could only print it
            self._failure = error

    def _go_through_rounds(self) -> None:
        copies = [torch.empty_like(tensor) for tensor in self._published.tensors]
        replica, size = self.replica, self.replica.count
        members = tuple(Worker(replica.stage, pipeline) for pipeline in range(size))
        while not self._all_have_arrived():
            with self._lock:
                for copy, published in zip(copies, self._published.tensors, strict=True):
                    copy.copy_(published)
            group = self._meet(Group(members, (1 / size,) * size, self._number, "everybody"))
            if len(group.members) > 1:
                turn_into_changes(self._mover, copies, group)
                with self._lock:
                    self._members = len(group.members)
                    for change, published in zip(copies, self._published.tensors, strict=True):
                        published.add_(change)
            self._number += 1
            self._arrived.wait(self.replica.exchange.interval)

    def _all_have_arrived(self) -> bool:
        """Wait for the threads of all workers; return whether all workers have arrived."""
        training = torch.tensor([0 if self._arrived.is_set() else 1])
        with waiting_for(self._channel, "averaging freely"):
            dist.all_reduce(training, group=self._channel)
        return not training.item()


class FreeAveraging(Synchronizer):
    """Averages beside training among replicas that come and go; see the module's text. Memory: two further models.

    Args:
        replica: this worker.
        mover: moves copies of the models; it begins again when a member is lost.
    """

    shares_next = True

    def __init__(self, replica: Replica, mover: Mover) -> None:
        super().__init__(replica)
        self._beside = Overlapped(mover, replica.timeout.total_seconds(), begins_again=True)
        self._asked = False
        self._due = 0.0  # time of the next average
        self._number = 0  # of the next average; all stages of a pipeline count alike from the moment they take part

    @property
    def models_averaged(self) -> int:
        """See the base class."""
        return self.replica.count

    def start(self) -> None:
        """See the base class."""
        self._number, self._due = 0, time.monotonic()

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

    def stop(self) -> None:
        """End the average that is asked for or under way, since others wait for it."""
        if self._asked:
            with labelled("group"):
                group = self.replica.client.group()
            self._begin(group)
        self._end()

    def _begin(self, group: Group | None) -> None:
        if group is None:
            return
        self._asked = False
        self._beside.begin(tensors_of(self.replica.exchanged), group)
        if not self._beside.is_under_way:  # no other member was there
            self._due = time.monotonic() + self.replica.exchange.interval

    def _end(self) -> int:
        """End the average that is under way, if there is one; return its members."""
        members = self._beside.members
        if self._beside.is_under_way:
            self._beside.end()
            self._due = time.monotonic() + self.replica.exchange.interval
        return members
