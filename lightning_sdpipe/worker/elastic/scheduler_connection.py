"""An elastic worker's two clients of the scheduler, and the effect of failures: they end its own pipeline only; and the
scheduler's store as torch takes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch._C._distributed_c10d import Store

from lightning_sdpipe.errors import LOST_CONNECTION, SchedulerError, WorkerFailedError, place_of
from lightning_sdpipe.partition.pipeline_cut import PipelineCut
from lightning_sdpipe.partition.plan import Plan
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.client.client import Failure, SchedulerClient
from lightning_sdpipe.scheduler.client.membership_client import Callbacks, CancelledError, MembershipClient, StoreClient
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
        self._watchdog = Watchdog(lambda failure: failure.reason, give_up, self._must_end)
        self._departed = False
        told = replace(told, ended=self._must_end, over=self._over)
        self.line = MembershipClient(
            scheduler.address, worker, incarnation, timeout=timeout, credentials=scheduler.keys, told=told
        )
        try:
            self.client = SchedulerClient(self.line, timeout)
            self.client.greet()
            self._watchdog.watch()
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


class SchedulerStore(Store):
    """A store of keys under ``room`` in the key-value store of the scheduler that ``client`` speaks to.

    The maker of a process group must keep a Python reference to the store while the group is being made. Every wait
    ends after ``timeout`` seconds with a SchedulerError, or with :class:`CancelledError` soon after ``cancelled``
    returns true: as when an epoch of membership is superseded while a member that is gone is waited for.

    gloo waits for each key and gets it then, its own, too. What was waited for, or set here, is there for the next
    ``get`` of it without another request: else a group of N asks a scheduler, which may be far away, 1 + 2 N times.
    """

    def __init__(
        self, client: StoreClient, room: str, timeout: float, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__()
        if "/" in room or not room:
            raise ValueError(f"room={room!r} is not allowed; give a name without a slash")
        self._client, self._room, self._seconds, self._cancelled = client, room, timeout, cancelled
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self._check()
        self._known[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._client.put(self._name(key), self._known[key], self._seconds)

    def get(self, key: str) -> bytes:
        known = self._known.pop(key, None)
        return self._wait([key], self._seconds)[0] if known is None else known

    def add(self, key: str, amount: int) -> int:
        self._check()
        return self._client.add(self._name(key), amount, self._seconds)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._check()
        missing = [key for key in keys if key not in self._known]
        if missing:
            found = self._wait(missing, self._seconds if timeout is None else timeout.total_seconds())
            self._known |= zip(missing, found, strict=True)

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._client.fetch([self._name(key) for key in keys], self._seconds)

    def delete_key(self, key: str) -> bool:
        return self._client.remove(self._name(key), self._seconds)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)

    def _wait(self, keys: Sequence[str], seconds: float) -> tuple[bytes, ...]:
        self._check()
        return self._client.wait([self._name(key) for key in keys], seconds, self._cancelled)

    def _name(self, key: str) -> str:
        return f"{self._room}/{key}"

    def _check(self) -> None:
        if self._cancelled():
            raise CancelledError(f"the process group of {self._room} is not needed any more")
