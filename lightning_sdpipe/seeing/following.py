"""Repeated observation of a run: the scheduler is asked for each heartbeat's rows once."""

from __future__ import annotations

import time
from dataclasses import fields

import msgspec

from lightning_sdpipe.meter import PHASES
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.connection import ask
from lightning_sdpipe.scheduler.credentials import WorkerKeys
from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.scheduler.rows import Chunk
from lightning_sdpipe.seeing.recording import Recording, Series, of_answers

KEPT = 1024


class Totals:
    """Totals of a worker over all its lives: the number of updates that it has reported, and the microseconds of each
    phase."""

    def __init__(self) -> None:
        self.updates = 0
        self.us = [0] * len(PHASES)

    def add(self, chunk: Chunk) -> None:
        """Add the rows of ``chunk``."""
        for row in chunk.rows:
            self.updates += row.count
            for phase, us in enumerate(row.us):
                self.us[phase] += us


class Follower:
    """Follows the run of the scheduler at ``address``, from the oldest rows that this still has.

    Args:
        address: address of the scheduler.
        keys: keys that open it.
        kept: number of newest updates of each worker in which findings are looked for; up to twice as many are kept.
    """

    def __init__(self, address: str, keys: WorkerKeys | None, kept: int = KEPT) -> None:
        self.address, self._keys, self._kept = address, keys, kept
        self.totals: dict[Worker, Totals] = {}
        self._series: dict[Worker, Series] = {}
        self._next = 0
        self._lost = 0

    def look(self, timeout: float) -> tuple[Recording, Status]:
        """Return the present state of the run.

        Raises:
            SchedulerError: the scheduler does not answer in time, or is of another version.
        """
        until = time.monotonic() + timeout
        status = ask(m.AskStatus(), m.StatusReply, self.address, credentials=self._keys, timeout=timeout).status
        while True:
            left = max(0.0, until - time.monotonic())
            question = m.AskRows(self._next)
            reply = ask(question, m.RowsReply, self.address, credentials=self._keys, timeout=left)
            if reply.next < self._next:  # the scheduler was started again
                self._next = 0
                continue
            if self._next:  # rows from before the first look are no loss
                self._lost += reply.first - self._next
            for data in reply.chunks:
                self._add(msgspec.msgpack.decode(data, type=Chunk))
            self._next = reply.next
            if not reply.chunks:
                break
        lost = f"{self._lost} heartbeats that came faster than they were asked for" if self._lost else ""
        return of_answers(status, reply, self._series, lost), status

    def _add(self, chunk: Chunk) -> None:
        if any(len(row.us) != len(PHASES) for row in chunk.rows):
            return
        self.totals.setdefault(chunk.worker, Totals()).add(chunk)
        series = self._series.get(chunk.worker)
        if series is None or series.life != chunk.life:
            series = self._series[chunk.worker] = Series(chunk.life)
        series.add(chunk)
        if len(series) >= 2 * self._kept:
            for column in fields(series):
                values = getattr(series, column.name)
                if isinstance(values, list):
                    del values[: self._kept]
