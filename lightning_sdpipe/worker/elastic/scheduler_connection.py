"""An elastic worker's two clients of the scheduler, and the effect of failures: they end its own pipeline only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_sdpipe.errors import LOST_CONNECTION, SchedulerError, WorkerFailedError, place_of
from lightning_sdpipe.partition.pipeline_cut import PipelineCut
from lightning_sdpipe.partition.plan import Plan
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.client.client import Failure, SchedulerClient
from lightning_sdpipe.scheduler.client.membership_client import Callbacks, MembershipClient
from lightning_sdpipe.worker.elastic import shared_cut
from lightning_sdpipe.worker.launching.watchdog import Watchdog
from lightning_sdpipe.worker.scheduler_connection import MakePlans, SchedulerAddress

log = logging.getLogger(__name__)
_LAST_WORDS = 5.0  # seconds


class ElasticConnection:
    """Connects a worker to the standing scheduler; see
    :class:`~lightning_sdpipe.worker.scheduler_connection.SchedulerConnection`.

    Args:
        scheduler: its address and keys.
        worker: this worker.
        incarnation: number of this start of its pipeline's job.
        timeout: seconds that any answer may take.
        told: functions to call when something happens; this object itself handles ``ended`` and ``over``.
        give_up: ends this process's wait for a tensor that will never come; called in another thread.
    """

    def __init__(
        self,
        scheduler: SchedulerAddress,
        worker: Worker,
        incarnation: int,
        timeout: float,
        told: Callbacks,
        give_up: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._watchdog = Watchdog(lambda failure: failure.reason, give_up)
        self._departed = False
        told = replace(told, ended=self._must_end, over=self._over)
        self.line = MembershipClient(
            scheduler.address, worker, incarnation, timeout=timeout, credentials=scheduler.keys, told=told
        )
        try:
            self.client = SchedulerClient(self.line, timeout)
            self.client.greet()
        except BaseException:
            self.line.close()
            raise

    def explain(self, error: Exception, told_to_end: Callable[[], bool]) -> None:
        """Raise SIGTERMException if this process was told to end; the scheduler's reason is in ``error`` itself."""
        if told_to_end():
            raise SIGTERMException from error

    def plan(self, cuts: Sequence[PipelineCut], make: MakePlans) -> Sequence[Plan]:
        """Return the plans of ``cuts``, cut as other pipelines of the run are where that is measured."""
        return shared_cut.plan(self.line, cuts, make)

    def fail(self, exception: BaseException) -> None:
        """Tell the scheduler of ``exception``, unless another process failed first: then it sees that this one ends."""
        self._watchdog.disarm()
        if isinstance(exception, SIGTERMException | KeyboardInterrupt):
            self.depart(finished=False)
            return
        self._departed = True  # and has not finished
        if not isinstance(exception, WorkerFailedError) and LOST_CONNECTION not in str(exception):
            self.line.failed(f"{type(exception).__name__}: {exception} ({place_of(exception)})")

    def depart(self, finished: bool) -> None:
        """End this worker with notice."""
        if not self._departed:
            self._departed = True
            try:
                self.line.depart(finished=finished, timeout=_LAST_WORDS)
            except (SchedulerError, WorkerFailedError) as error:  # all that had to be done is done
                log.warning("the scheduler was not told that this worker ends: %s", error)

    def close(self) -> None:
        self._watchdog.disarm()
        self.line.close()

    def _must_end(self, reason: str) -> None:
        self._watchdog.arm(Failure(self._worker, f"Pipeline {self._worker.pipeline} must end: {reason}"))

    def _over(self, reason: str, failed: bool) -> None:
        if failed:
            self._watchdog.arm(Failure(self._worker, f"The run is over: {reason}"))
