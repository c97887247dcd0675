"""One worker's place in a run: its line to the scheduler, and who is told what when a worker fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_sdpipe.errors import SchedulerError, WorkerFailedError
from lightning_sdpipe.launching import job
from lightning_sdpipe.launching.last_resort import LastResort
from lightning_sdpipe.mesh import Mesh
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler.client import Failure
from lightning_sdpipe.sync.rendezvous import SchedulerAddress, connect, start_scheduler

_BY_SIGNAL: Mapping[type[BaseException], str] = {
    KeyboardInterrupt: "ended by Ctrl-C",
    SIGTERMException: "ended by SIGTERM",
}


class Membership:
    """Connects this rank to the scheduler, which rank 0 starts if no standing one is given; every rank must do so.

    Args:
        bind: where a scheduler that is started listens.
        timeout: seconds that any answer of it may take.
        give_up: ends this process's wait for a tensor that will never come; called in another thread.
        log: file for the events and decisions of a scheduler that is started.
    """

    def __init__(
        self,
        mesh: Mesh,
        policy: PolicyConfig,
        standing: SchedulerAddress | None,
        bind: Callable[[], str],
        timeout: float,
        give_up: Callable[[], None],
        log: Path | None = None,
    ) -> None:
        self._mesh = mesh
        self._worker = Worker(*mesh.locate(dist.get_rank()))
        self._scheduler, where = (None, standing) if standing else start_scheduler(policy, mesh, bind(), log)
        self._last_resort = LastResort(self._describe, give_up)
        self.client = connect(where, mesh, timeout, self._last_resort.arm, embedded=standing is None)

    @contextmanager
    def first_failure(self, told_to_end: Callable[[], bool]) -> Iterator[None]:
        """A worker that fails takes others down with it; those say who was first and why.

        Raises:
            WorkerFailedError: names who failed first.
            SIGTERMException: this process was ``told_to_end`` too, and the other one was faster.
        """
        try:
            yield
        except (WorkerFailedError, SchedulerError) as error:
            failure = self.client.first_failure(timeout=2.0)
            if told_to_end() and (failure is None or failure.reason == _BY_SIGNAL[SIGTERMException]):
                raise SIGTERMException from error
            if failure is None or failure.worker == self._worker:
                raise
            raise WorkerFailedError(self._describe(failure)) from error

    def fail(self, exception: BaseException) -> None:
        """Tells the others of ``exception``, unless it came from one of them."""
        self._last_resort.disarm()
        if not isinstance(exception, WorkerFailedError):
            by_signal = _BY_SIGNAL.get(type(exception))
            self.client.failed(by_signal or f"{type(exception).__name__}: {exception}")
            if by_signal:  # which ends a process without a word
                print(f"{self._place(self._worker)} was {by_signal}.", file=sys.stderr, flush=True)
        if self._scheduler is not None:  # the others still have to hear of it
            job.at_end(self._scheduler.close)
            self._scheduler = None

    def close(self) -> None:
        self.client.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def _describe(self, failure: Failure) -> str:
        who = "The scheduler" if failure.worker is None else self._place(failure.worker)
        return f"{who} failed first and ended the run: {failure.reason}"

    def _place(self, worker: Worker) -> str:
        rank = self._mesh.rank(worker.stage, worker.pipeline)
        return f"Stage {worker.stage} of pipeline {worker.pipeline} (rank {rank})"
