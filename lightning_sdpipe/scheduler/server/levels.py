"""What is true for each process, and what it has heard of that.

It is said to all that it concerns when it changes, once an input is dealt with, and again to a process whose beat says
that it has not seen it. Those that are told the same get one message, which is encoded once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from lightning_sdpipe.membership.membership import Membership
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler.server.outbox import Outbox

MOST_LOST = 8
"""Workers that are named, the last ones."""


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
    """Of the processes of a run, as ``membership`` has it."""

    def __init__(self, membership: Membership, outbox: Outbox) -> None:
        self.lost: dict[Worker, str] = {}
        """Those of which nothing is heard, and since when, for people."""
        self.broken: Callable[[Worker], tuple[int, ...]] = lambda worker: ()
        """Groups that broke, of which a worker has said nothing."""
        self._membership, self._outbox = membership, outbox
        self._processes: dict[Worker, _Process] = {}
        self._changed: dict[Worker, None] = {}
        self._version = secrets.randbits(40)
        """None that a process has heard of an earlier scheduler."""

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

    def hear(self, beat: e.Beat) -> bool:
        """A process that is there says what it has seen; is that all?"""
        process = self._processes[beat.worker]
        process.seen, process.epoch = beat.seen, beat.epoch
        if beat.seen != process.version:
            self.change([beat.worker])
        return beat.seen == process.version

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
