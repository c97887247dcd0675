"""Which processes of a run are there, by what connections, when each was heard of last, and what it has heard."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from lightning_sdpipe.membership.membership import Membership
from lightning_sdpipe.membership.silence import Silence
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler.server.lifelines import Lines
from lightning_sdpipe.scheduler.server.outbox import Outbox

logger = logging.getLogger(__name__)


MOST_LOST = 8
"""Workers that are named, the last ones."""


class Liveness:
    """``limit`` is in seconds; what silence for so long means is decided by
    :class:`~lightning_sdpipe.membership.silence.Silence`, to which ``unit`` names what falls silent together."""

    def __init__(self, limit: float, lines: Lines, now: float, unit: Callable[[Worker], object]) -> None:
        self.lines = lines
        self.incarnations: dict[Worker, int] = {}
        """Of those that are there."""
        self._silence = Silence(limit, now, unit)

    @property
    def next_look(self) -> float:
        """When a process may have been silent for too long."""
        return self._silence.due

    @property
    def lost(self) -> Mapping[Worker, float]:
        """Those of which nothing has come since they were lost, and when something came last."""
        return self._silence.lost

    def comes(self, worker: Worker, incarnation: int, now: float) -> None:
        """That process is there."""
        self.incarnations[worker] = incarnation
        self.hear(worker, now)

    def hear(self, worker: Worker, now: float) -> None:
        """Something of ``worker`` came."""
        self._silence.hear(worker, now)

    def goes(self, pipeline: int, incarnation: int) -> list[Worker]:
        """That start of ``pipeline`` is over; its workers."""
        gone = [
            worker for worker, own in self.incarnations.items() if worker.pipeline == pipeline and own == incarnation
        ]
        for worker in gone:
            self.leaves(worker)
        self.lines.forget(pipeline, incarnation)
        return gone

    def leaves(self, worker: Worker) -> None:
        """Its process is not there any more."""
        self.incarnations.pop(worker, None)
        self._silence.forget(worker)

    def of(self, pipelines: Collection[int]) -> list[Worker]:
        """Those of ``pipelines`` that are there."""
        among = set(pipelines)
        return [worker for worker in self.incarnations if worker.pipeline in among]

    def silent(
        self, now: float, members: Collection[object], replaced: Collection[int]
    ) -> list[tuple[Worker, int, float]]:
        """The processes that are lost, and for how many seconds each has been silent; see
        :meth:`~lightning_sdpipe.membership.silence.Silence.look`. Call it when :attr:`next_look` has come."""
        silence = self._silence
        before, lost = silence.of_all_since, silence.look(now, members, replaced)
        if before is None and silence.of_all_since is not None:
            logger.warning(
                "nothing was heard of any worker for %.1f s: this scheduler seems to be cut off from them; none is "
                "called lost for that",
                now - silence.of_all_since,
            )
        return [(worker, self.incarnations[worker], seconds) for worker, seconds in lost]

    def waits(self, now: float) -> str:
        """Since when nothing has come of any process, for people, if that is for long."""
        since = self._silence.of_all_since
        return "" if since is None else f"nothing was heard of any worker for {now - since:.0f} s"


@dataclass
class _Process:
    """What one was told, and what it said last that it has heard."""

    incarnation: int
    line: e.Line
    first: int = 0
    version: int = 0
    seen: int = 0
    epoch: int = 0


class Levels:
    """What is true for each process of a run, as ``membership`` has it, and what it has heard of that.

    It is said to all that it concerns when it changes, once an input is dealt with, and again to a process whose beat
    says that it has not seen it. Those that are told the same get one message, which is encoded once.
    """

    def __init__(self, membership: Membership, outbox: Outbox) -> None:
        self.lost: dict[Worker, str] = {}
        """Those of which nothing is heard, and since when, for people."""
        self.broken: Callable[[Worker], tuple[int, ...]] = lambda worker: ()
        """Groups that broke, of which a worker has said nothing."""
        self._membership, self._outbox = membership, outbox
        self._processes: dict[Worker, _Process] = {}
        self._changed: dict[Worker, None] = {}
        self._version = secrets.randbits(40) << e.LIFE

    def comes(self, worker: Worker, incarnation: int, line: e.Line) -> None:
        """That process is there."""
        self._processes[worker] = _Process(incarnation, line)
        self.change([worker])

    def goes(self, workers: Iterable[Worker]) -> None:
        """Their processes are gone."""
        for worker in workers:
            self._processes.pop(worker, None)
            self._changed.pop(worker, None)
            self.lost.pop(worker, None)

    def change(self, workers: Iterable[Worker]) -> None:
        """Something else is true for them now."""
        self._changed.update(dict.fromkeys(workers))

    def hear(self, beat: e.Beat) -> None:
        """A process that is there says what it has seen."""
        process = self._processes[beat.worker]
        process.seen, process.epoch = beat.seen, beat.epoch
        if beat.seen != process.version:
            self.change([beat.worker])

    def tell(self) -> None:
        """Say what has changed."""
        if not self._changed:
            return
        self._version += 1
        core = self._membership
        hold = None if core.recovering else core.ending.holds
        lost = tuple(self.lost.items())[-MOST_LOST:]
        known, new = (e.Now(self._version, None, epoch, hold, lost=lost) for epoch in (None, core.epoch))
        for worker in self._changed:
            process = self._processes.get(worker)
            if process is None:
                continue
            member = not core.recovering and core.roster.is_member(worker.pipeline, process.incarnation)
            now = new if member and process.epoch < core.epoch.number else known
            has_line = 0 < process.first <= process.seen <= process.version
            line = None if has_line else process.line
            donate = core.donations.unheard(worker) if member else ()
            broken = self.broken(worker)
            if line or donate or broken:
                now = msgspec.structs.replace(now, line=line, donate=donate, broken=broken)
            process.first, process.version = process.first or self._version, self._version
            self._outbox.say(e.peer_of(worker, process.incarnation), now)
        self._changed.clear()
