"""Exchanges that go on while a worker computes: one after the other, in a separate thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from lightning_sdpipe import meter
from lightning_sdpipe.errors import WorkerFailedError


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
    """A thread that does its jobs in the order in which they come. It ends with the process.

    Args:
        purpose: purpose of the jobs, for messages.
        timeout: seconds for which a job may be waited for. It is longer than the timeout after which transfers give up.
    """

    def __init__(self, purpose: str, timeout: float | None) -> None:
        self._purpose = purpose
        self._timeout = timeout
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> Job:
        """Start ``work`` as soon as all earlier jobs are done."""
        if self._thread is None:  # not before there is anything to do: a fork would not inherit it
            self._thread = threading.Thread(target=self._run, name=self._purpose, daemon=True)
            self._thread.start()
        job = Job(work, self._purpose, self._timeout)
        self._jobs.put(job)
        return job

    def _run(self) -> None:
        while True:
            self._jobs.get().run()
