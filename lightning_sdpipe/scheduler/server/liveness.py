"""Presence of a run's processes: their connections, when each was last heard of, and what it has heard."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from lightning_sdpipe.membership.failure_detection import Silence
from lightning_sdpipe.membership.membership import Membership
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler.rows import About
from lightning_sdpipe.scheduler.server.lifelines import Lines
from lightning_sdpipe.scheduler.server.outbox import Outbox

logger = logging.getLogger(__name__)


MOST_NAMED = 4
"""Most workers whose waits are named when a run stands still."""


class Liveness:
    """Watches for silence of ``limit`` seconds; :class:`~lightning_sdpipe.membership.failure_detection.Silence` decides
    what it means, and ``unit`` tells it which workers fall silent together."""

    def __init__(self, limit: float, lines: Lines, now: float, unit: Callable[[Worker], object]) -> None:
        self.lines = lines
        self.incarnations: dict[Worker, int] = {}
        """Incarnation of each process that is there."""
        self.awaits: dict[Worker, Sequence[str]] = {}
        """What each process waits for if no byte has come or gone for the limit, as its last
        :class:`~lightning_sdpipe.scheduler.membership_protocol.Beat` said; else empty."""
        self._limit = limit
        self._silence = Silence(limit, now, unit)

    @property
    def next_look(self) -> float:
        """Time at which a process may have been silent for too long."""
        return self._silence.due

    def comes(self, worker: Worker, incarnation: int, now: float) -> None:
        """Note that this process is there."""
        self.incarnations[worker] = incarnation
        self.hear(worker, now)

    def hear(self, worker: Worker, now: float) -> None:
        """Note that a message of ``worker`` came."""
        self._silence.hear(worker, now)

    def goes(self, pipeline: int, incarnation: int) -> list[Worker]:
        """Forget the processes of that start of ``pipeline``, which is over; return its workers."""
        gone = [
            worker for worker, own in self.incarnations.items() if worker.pipeline == pipeline and own == incarnation
        ]
        for worker in gone:
            self.leaves(worker)
        self.lines.forget(pipeline, incarnation)
        return gone

    def leaves(self, worker: Worker) -> None:
        """Forget the process of ``worker``, which is no longer there."""
        self.incarnations.pop(worker, None)
        self.awaits.pop(worker, None)
        self._silence.forget(worker)

    def of(self, pipelines: Collection[int]) -> list[Worker]:
        """Return the workers of ``pipelines`` that are there."""
        among = set(pipelines)
        return [worker for worker in self.incarnations if worker.pipeline in among]

    def silent(
        self, now: float, members: Collection[object], replaced: Collection[int]
    ) -> list[tuple[Worker, int, float]]:
        """Return the processes that are lost, and for how many seconds each has been silent; see
        :meth:`~lightning_sdpipe.membership.failure_detection.Silence.look`. Call it when :attr:`next_look` has come."""
        silence = self._silence
        before, lost = silence.of_all_since, silence.look(now, members, replaced)
        if before is None and silence.of_all_since is not None:
            logger.warning(
                "nothing was heard of any worker for %.1f s: this scheduler seems to be cut off from them; none is "
                "called lost for that",
                now - silence.of_all_since,
            )
        return [(worker, self.incarnations[worker], seconds) for worker, seconds in lost]

    def out_of_reach(self, now: float, about: Mapping[Worker, About]) -> tuple[Worker, str] | None:
        """Return the first worker that is lost for silence and whose machine does not answer either, with what happened
        to it; ``about`` describes the workers. A worker whose machine answers is alive: it is stopped, or a call lets
        none of its threads run."""
        for worker, heard in self._silence.lost.items():
            if not self.lines.answers(worker, self.incarnations[worker], self._limit):
                where = f" on {about[worker].host}" if worker in about else ""
                reason = f"it was silent for {now - heard:.0f} s, and its process{where} cannot be reached; check that "
                return worker, f"{reason}its machine and the network to it are up"
        return None

    def parted(self, workers: int) -> tuple[Worker, str] | None:
        """Return the worker with the most unanswered peers, and what happened, if all ``workers`` of the run wait for
        each other while no byte moves."""
        waits = {worker: awaits for worker, awaits in sorted(self.awaits.items()) if awaits}
        if len(waits) < workers or self._silence.lost:
            return None
        first, *more = sorted(waits, key=lambda worker: -len(waits[worker]))
        said = [f"worker {worker} is {_said(waits[worker])}" for worker in (first, *more[: MOST_NAMED - 1])]
        return first, (
            f"all workers wait, and no byte has come or gone between them for {self._limit:.0f} s: "
            f"{'; '.join(said)}. They reach the scheduler; check the network between their machines"
        )

    def waits(self, now: float) -> str:
        """Describe for how long no process was heard of, if that is long."""
        since = self._silence.of_all_since
        return "" if since is None else f"nothing was heard of any worker for {now - since:.0f} s"


def _said(awaits: Sequence[str]) -> str:
    what, *silent = awaits
    return f"{what}, and nothing that it sent to {' and '.join(silent)} is acknowledged" if silent else what


@dataclass
class _Process:
    """A process: what it was told, and what it last said that it has heard."""

    incarnation: int
    line: e.Line
    first: int = 0
    version: int = 0
    seen: int = 0
    epoch: int = 0


class Levels:
    """Facts that hold for each process of a run, as ``membership`` has them, and what each process has heard of them.

    A process is told when a fact changes, once per input, and again when its beat says that it has not seen the change.
    Processes that are told the same get one message, which is encoded once.
    """

    def __init__(self, membership: Membership, outbox: Outbox) -> None:
        self.stuck: Callable[[Worker], tuple[int, ...]] = lambda worker: ()
        """Returns the exchanges that a worker is to break off."""
        self._membership, self._outbox = membership, outbox
        self._processes: dict[Worker, _Process] = {}
        self._changed: dict[Worker, None] = {}
        self._version = secrets.randbits(40) << e.LIFE

    @property
    def life(self) -> int:
        """Upper bits of all versions; other schedulers have others."""
        return self._version >> e.LIFE

    def comes(self, worker: Worker, incarnation: int, line: e.Line) -> None:
        """Note that this process is there."""
        self._processes[worker] = _Process(incarnation, line)
        self.change([worker])

    def goes(self, workers: Iterable[Worker]) -> None:
        """Forget these workers, whose processes are gone."""
        for worker in workers:
            self._processes.pop(worker, None)
            self._changed.pop(worker, None)

    def change(self, workers: Iterable[Worker]) -> None:
        """Mark the facts of these workers as changed."""
        self._changed.update(dict.fromkeys(workers))

    def hear(self, beat: e.Beat) -> None:
        """Note what a process says that it has seen."""
        process = self._processes[beat.worker]
        process.seen, process.epoch = beat.seen, beat.epoch
        if beat.seen != process.version:
            self.change([beat.worker])

    def tell(self) -> None:
        """Send what has changed."""
        if not self._changed:
            return
        self._version += 1
        core = self._membership
        hold = None if core.recovering else core.ending.holds
        known, new = (e.Now(self._version, None, epoch, hold) for epoch in (None, core.epoch))
        for worker in self._changed:
            process = self._processes.get(worker)
            if process is None:
                continue
            member = not core.recovering and core.roster.is_member(worker.pipeline, process.incarnation)
            now = new if member and process.epoch < core.epoch.number else known
            has_line = 0 < process.first <= process.seen <= process.version
            line = None if has_line else process.line
            donate = core.donations.unheard(worker) if member else ()
            stuck = self.stuck(worker)
            if line or donate or stuck:
                now = msgspec.structs.replace(now, line=line, donate=donate, stuck=stuck)
            process.first, process.version = process.first or self._version, self._version
            self._outbox.say(e.peer_of(worker, process.incarnation), now)
        self._changed.clear()
