"""An elastic worker's client of the scheduler, and the effect of failures: they end its own pipeline only; the
scheduler's store in the form that torch takes; and the cut that all pipelines of the run agree on there.

Where the cut follows from measured times, all pipelines take that of the first one that has measured; those that come
later do not measure. They agree before they enrol: a pipeline that has measured takes a number, and number 1 tells the
sizes of its stages. Members make each scheduler of the run keep the sizes, since a store does not survive its
scheduler.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import msgspec
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch._C._distributed_c10d import Store

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import LOST_CONNECTION, SchedulerError, WorkerFailedError, place_of
from lightning_sdpipe.partition.pipeline_cut import PipelineCut, is_measured
from lightning_sdpipe.partition.plan import Plan
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.client.client import Callbacks, CancelledError, SchedulerClient
from lightning_sdpipe.scheduler.membership_protocol import End
from lightning_sdpipe.worker.scheduler_connection import MakePlans, SchedulerAddress, Watchdog, ended_by

log = logging.getLogger(__name__)

_TELLING = 20.0
"""Seconds in which the pipeline of number 1 must have told its cut; that takes it one message."""
_LAST_WORDS = 5.0  # seconds


def shared_plans(client: SchedulerClient, cuts: Sequence[PipelineCut], make: MakePlans) -> Sequence[Plan]:
    """Return the plans of the cut that the pipelines of a run have, the same on all of them.

    Args:
        client: that of the scheduler.
        cuts: the cut that was asked for; or that of each pipeline, none of which is measured.
        make: makes the plans of cuts, and measures for them if that is needed.
    """
    if not any(is_measured(cut.partition) for cut in cuts):
        return make(cuts)
    (cut,) = cuts
    made: Sequence[Plan] = ()
    sizes = _from_rank_zero(lambda: known(client, cut))
    if sizes is None:
        made = make(cuts)
        mine = [len(span) for span in made[0].spans]
        sizes = _from_rank_zero(lambda: agree(client, cut, mine))
        assert sizes is not None
    if not made or [len(span) for span in made[0].spans] != sizes:
        made = make([replace(cut, partition=sizes)])
    if dist.get_rank() == 0:
        client.keep(key_of(cut), encode(sizes))
    return made


def _from_rank_zero(ask: Callable[[], list[int] | None]) -> list[int] | None:
    world = dist.group.WORLD
    assert world is not None
    told: list[int] | None = p2p.broadcast_value(ask() if dist.get_rank() == 0 else None, 0, world)
    return told


def key_of(cut: PipelineCut, name: str = "kept") -> str:
    """Return the key of what pipelines tell each other about ``cut``: the sizes that members keep, the ``"sizes"`` of
    the first, or the ``"number"`` of those that have measured."""
    asked = hashlib.sha256(repr(cut).encode()).hexdigest()[:12]
    return f"cut-{asked}/{name}"


def encode(sizes: Sequence[int]) -> bytes:
    """Return the numbers of blocks of the stages for the store."""
    return json.dumps([*sizes]).encode()


def known(store: SchedulerClient, cut: PipelineCut) -> list[int] | None:
    """Return the sizes that a pipeline of the run has told; None if none has."""
    for value in store.fetch([key_of(cut), key_of(cut, "sizes")]):
        if value is not None:
            sizes: list[int] = json.loads(value)
            return sizes
    return None


def agree(store: SchedulerClient, cut: PipelineCut, mine: Sequence[int], seconds: float = _TELLING) -> list[int]:
    """Return the sizes that all pipelines use: ``mine``, which follow from this pipeline's measurement, unless another
    was first. A first one that is lost before it has told is waited for ``seconds``."""
    if store.add(key_of(cut, "number"), 1) > 1:
        try:
            store.wait([key_of(cut, "sizes")], seconds)
        except SchedulerError as error:
            log.warning("the first pipeline that measured did not tell its cut; this one's is taken (%s)", error)
    told = known(store, cut)
    if told is None:
        store.put(key_of(cut, "sizes"), encode(mine))
    return [*mine] if told is None else told


class ElasticConnection:
    """Connects a worker to the standing scheduler; see
    :class:`~lightning_sdpipe.worker.scheduler_connection.SchedulerConnection`.

    Args:
        scheduler: its address and keys.
        worker: this worker.
        incarnation: number of this start of its pipeline's job.
        timeout: seconds that any answer may take.
        told: functions to call when something happens; this object itself handles ``ends``.
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
        self._watchdog = Watchdog(
            lambda failure: failure.reason, give_up, lambda lost: self._must_end(End(lost, run=False))
        )
        self._departed = False
        told = replace(told, ends=self._must_end)
        self.client = SchedulerClient(
            scheduler.address, worker, incarnation, timeout=timeout, credentials=scheduler.keys, told=told
        )
        try:
            self.client.greet()
            self._watchdog.watch()
        except BaseException:
            self.client.close()
            raise

    def explain(self, error: Exception, told_to_end: Callable[[], bool]) -> None:
        """Raise SIGTERMException if this process was told to end; the scheduler's reason is in ``error`` itself."""
        if told_to_end():
            raise SIGTERMException from error

    def plan(self, cuts: Sequence[PipelineCut], make: MakePlans) -> Sequence[Plan]:
        """Return the plans of ``cuts``; a measured cut is that of the run's other pipelines."""
        return shared_plans(self.client, cuts, make)

    def fail(self, exception: BaseException) -> None:
        """Tell the scheduler of ``exception``, unless another process failed first: then the scheduler sees that this
        one ends."""
        self._watchdog.disarm()
        if ended_by(exception):
            self.depart(finished=False)
            return
        self._departed = True  # and has not finished
        if not isinstance(exception, WorkerFailedError) and LOST_CONNECTION not in str(exception):
            self.client.failed(f"{type(exception).__name__}: {exception} ({place_of(exception)})")

    def depart(self, finished: bool) -> None:
        """End this worker with notice."""
        if not self._departed:
            self._departed = True
            try:
                self.client.depart(finished=finished, timeout=_LAST_WORDS)
            except (SchedulerError, WorkerFailedError) as error:  # all that had to be done is done
                log.warning("the scheduler was not told that this worker ends: %s", error)

    def close(self) -> None:
        self._watchdog.disarm()
        self.client.close()

    def _must_end(self, end: End) -> None:
        what = "The run is over" if end.run else f"Pipeline {self._worker.pipeline} must end"
        if end.failed:
            self._watchdog.arm(msgspec.structs.replace(end, reason=f"{what}: {end.reason}"))


class SchedulerStore(Store):
    """A store of keys under ``room`` in the key-value store of the scheduler that ``client`` speaks to.

    The maker of a process group must keep a Python reference to the store while the group is being made. Every wait
    ends after ``timeout`` seconds with a SchedulerError, or with :class:`CancelledError` soon after ``cancelled``
    returns true: as when an epoch of membership is superseded while a member that is gone is waited for.

    gloo waits for each key, its own too, and then gets it. The first ``get`` of a key that was waited for, or set here,
    makes no request: otherwise a group of N would ask a scheduler, which may be far away, 1 + 2 N times.
    """

    def __init__(
        self, client: SchedulerClient, room: str, timeout: float, cancelled: Callable[[], bool] = lambda: False
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
