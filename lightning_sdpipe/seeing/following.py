"""Follows a run, asking the scheduler for each heartbeat's rows only once."""

from __future__ import annotations

from dataclasses import fields

import msgspec

from lightning_sdpipe.meter import PHASES
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.wire import ask
from lightning_sdpipe.scheduler.credentials import WorkerKeys
from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.scheduler.rows import Chunk
from lightning_sdpipe.seeing.recording import Recording, Series, add, of_answers

KEPT = 1024
NEWEST = 256
"""Number of each worker's newest chunks that suffice for one look: some minutes, or more if updates are slow."""


class Follower:
    """Follows the run of the scheduler at ``address``.

    Args:
        address: address of the scheduler.
        keys: keys that open it.
        kept: number of each worker's newest updates that are kept for findings; at times, up to twice as many are.
        newest: number of each worker's newest chunks to ask for at first; None for all that the scheduler still has.
    """

    def __init__(self, address: str, keys: WorkerKeys | None, kept: int = KEPT, newest: int | None = None) -> None:
        self.address, self._keys, self._kept, self._newest = address, keys, kept, newest
        self.totals: dict[Worker, list[int]] = {}
        """For each worker, the number of updates reported over all its lives, and the microseconds of each phase."""
        self._series: dict[Worker, Series] = {}
        self._next: int | None = None
        self._lost = 0
        self._starts: list[float] = []
        """When the scheduler was started and restarted, in seconds of its clock."""

    def poll(self, timeout: float) -> tuple[Recording, Status]:
        """Return the present state of the run. Each of several answers must come within ``timeout`` seconds; answers
        before one that does not are kept, and not asked for again.

        Raises:
            SchedulerError: the scheduler does not answer in time, or has another version.
        """
        status = ask(m.Ask("status"), m.StatusReply, self.address, credentials=self._keys, timeout=timeout).status
        first = 0 if self._newest is None else -self._newest * max(1, len(status.workers()))
        while True:
            question = m.Ask("rows", first if self._next is None else self._next)
            reply = ask(question, m.RowsReply, self.address, credentials=self._keys, timeout=timeout)
            if self._next is not None and reply.next < self._next:  # the scheduler restarted
                self._next = 0
                continue
            if self._next:  # rows from before the first look are no loss
                self._lost += reply.first - self._next
            for data in reply.chunks:
                self._add(msgspec.msgpack.decode(data, type=Chunk))
            self._next = reply.next
            if not reply.chunks:
                break
        if status.started not in self._starts:
            self._starts.append(status.started)
        lost = f"{self._lost} heartbeats that came faster than they were asked for" if self._lost else ""
        series = {worker: each.copy() for worker, each in self._series.items()}  # a page may be made during later polls
        return of_answers(status, reply, series, lost, self._starts), status

    def _add(self, chunk: Chunk) -> None:
        if not add(self._series, chunk):
            return
        totals = self.totals.setdefault(chunk.worker, [0] * (1 + len(PHASES)))
        for row in chunk.rows:
            totals[:] = map(sum, zip(totals, (row.count, *row.us), strict=True))
        series = self._series[chunk.worker]
        if len(series) >= 2 * self._kept:
            for column in fields(series):
                values = getattr(series, column.name)
                if isinstance(values, list):
                    del values[: self._kept]
