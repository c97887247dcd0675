"""Exchanges that go on while a worker computes: one after the other, in a separate thread.

With ``overlap="step"`` and ``"free"`` a worker gives away a copy of its model and trains on. When the mean is there, it
adds the difference between the mean and that copy (this is both the overlapped and the asynchronous form of BAGUA
§3.2). So no update is lost, and the mean over the members stays what it would be.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_sdpipe import meter
from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.moving import Mover, copied, pieces_of
from lightning_sdpipe.policies.decisions import Group


class Job:
    """Work that was given to a :class:`Background`; waits as a ``dist.Work`` does."""

    def __init__(self, work: Callable[[], None], purpose: str, timeout: float | None) -> None:
        self._work = work
        self._purpose = purpose
        self._timeout = timeout
        self._done = threading.Event()
        self._failure: BaseException | None = None
        self._span: tuple[int, int, int] | None = None

    def run(self) -> None:
        """Do the work; an exception of it is raised where it is waited for."""
        begun = meter.CLOCK()
        try:
            with torch.no_grad():
                self._work()
        except BaseException as error:
            self._failure = error
        self._span = meter.HIDDEN, begun, meter.CLOCK()
        self._done.set()

    @property
    def is_done(self) -> bool:
        """True if :meth:`wait` returns, or raises, at once."""
        return self._done.is_set()

    def wait(self) -> float:
        """Wait until the work is done.

        Returns:
            Seconds waited.

        Raises:
            WorkerFailedError: the work is not done within the timeout; or the exception that it raised.
        """
        start = meter.CLOCK()
        if not self._done.wait(self._timeout):
            raise WorkerFailedError(f"{self._purpose} was not done within {self._timeout:g} s")
        if self._failure is not None:
            raise self._failure
        if self._span is not None:
            meter.current().kept.append(self._span)
            self._span = None  # it may be waited for again
        return (meter.CLOCK() - start) / 1e9


class Background:
    """A thread that does its jobs in the order in which they come. It ends when nothing refers to this object any more.

    Args:
        purpose: purpose of the jobs, for messages.
        timeout: seconds for which a job may be waited for. It is longer than the timeout after which transfers give up.
    """

    def __init__(self, purpose: str, timeout: float | None) -> None:
        self._purpose = purpose
        self._timeout = timeout
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> Job:
        """Start ``work`` as soon as all earlier jobs are done."""
        if self._thread is None:  # not before there is anything to do: a fork would not inherit it
            self._thread = threading.Thread(target=_run, args=(self._jobs,), name=self._purpose, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        job = Job(work, self._purpose, self._timeout)
        self._jobs.put(job)
        return job


def _run(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # and what it holds, until the next one comes


class Overlapped:
    """Runs one exchange at a time of tensors that go on changing. Memory: a copy of the tensors.

    Args:
        mover: moves copies of the tensors.
        timeout: seconds in which an exchange must have ended.
    """

    def __init__(self, mover: Mover, timeout: float) -> None:
        self._mover = mover
        self._background = Background("averaging models beside training", 2 * timeout)
        self.members = 1
        """Number of members of the exchange that is under way; 1 if none is."""
        self._copies: list[Tensor] = []
        self._tensors: Sequence[Tensor] = ()
        self._job: Job | None = None

    def begin(self, tensors: Sequence[Tensor], group: Group) -> None:
        """Start to exchange ``tensors`` as they are now. The last exchange must have ended."""
        assert self._job is None, "end() comes before the next begin()"
        if len(group.members) == 1:
            return
        self.members = len(group.members)
        self._tensors, self._copies = tensors, copied(tensors, self._copies)
        self._job = self._background.do(lambda: turn_into_changes(self._mover, self._copies, group))

    @property
    def is_under_way(self) -> bool:
        """True if an exchange has begun whose change has not been added."""
        return self._job is not None

    @property
    def waits(self) -> bool:
        """True if :meth:`end` would wait."""
        return self._job is not None and not self._job.is_done

    def end(self) -> float:
        """Wait for the exchange that is under way, if there is one, and add the change to the tensors.

        Returns:
            Seconds waited.

        Raises:
            WorkerFailedError: a member is gone, or a transfer has timed out; the tensors have not changed.
        """
        if self._job is None:
            return 0.0
        job, self._job, self.members = self._job, None, 1
        waited = job.wait()
        for tensor, change in zip(self._tensors, self._copies, strict=True):
            tensor.add_(change)
        return waited


def turn_into_changes(mover: Mover, copies: Sequence[Tensor], group: Group) -> None:
    """Replace copies of models by the changes to add to these, piece by piece; the change is zero for pieces that a
    mover has given up with a lost member.

    Raises:
        WorkerFailedError: a member is gone, or a transfer has timed out.
    """
    pending = mover.start(copies, group)
    try:
        for piece in pieces_of(copies):
            if not pending.wait():
                piece.zero_()
                continue
            before = piece.clone()
            pending.commit()
            piece.sub_(before)
        pending.wait()
    except BaseException:
        pending.abort()
        raise
