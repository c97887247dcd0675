"""Which processes of an elastic run are there, by what connections, and when each was heard of last."""

from __future__ import annotations

import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Collection, Iterator

from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import elastic_messages as e
from lightning_sdpipe.scheduler.lifelines import NONCE_BYTES

logger = logging.getLogger(__name__)

MOST_LINES = 1 << 16


class Presence:
    """A process is silent when nothing of it has come for ``limit`` seconds."""

    def __init__(self, limit: float) -> None:
        self.incarnations: dict[Worker, int] = {}
        """Of those that are there."""
        self.next_look = math.inf
        """When somebody may have been silent for too long."""
        self._limit = limit
        self._heard: dict[Worker, float] = {}
        self._lines: OrderedDict[bytes, tuple[Worker, int]] = OrderedDict()

    def comes(self, worker: Worker, incarnation: int, now: float) -> None:
        """That process is there."""
        self.incarnations[worker] = incarnation
        self.hear(worker, now)

    def hear(self, worker: Worker, now: float) -> None:
        """Something of ``worker`` came."""
        self._heard[worker] = now
        self.next_look = min(self.next_look, now + self._limit)

    def new_line(self, worker: Worker, incarnation: int) -> bytes:
        """The nonce by which that process's connection is known."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._lines[nonce] = worker, incarnation
        while len(self._lines) > MOST_LINES:
            self._lines.popitem(last=False)
        return nonce

    def knows_line(self, nonce: bytes) -> bool:
        """Was ``nonce`` given to a process, whose connection has not closed yet?"""
        return nonce in self._lines

    def of_line(self, nonce: bytes) -> tuple[Worker, int] | None:
        """Whose connection that was, which is closed."""
        return self._lines.pop(nonce, None)

    def goes(self, pipeline: int, incarnation: int) -> list[Worker]:
        """That start of ``pipeline`` is over; its workers."""
        gone = [
            worker for worker, own in self.incarnations.items() if worker.pipeline == pipeline and own == incarnation
        ]
        for worker in gone:
            del self.incarnations[worker], self._heard[worker]
        for nonce in [nonce for nonce, (w, own) in self._lines.items() if (w.pipeline, own) == (pipeline, incarnation)]:
            del self._lines[nonce]
        return gone

    def peers(self, pipelines: Collection[int], stage: int | None = None) -> Iterator[bytes]:
        """The sockets of the processes of ``pipelines``, in ``stage`` or in all."""
        for worker, incarnation in self.incarnations.items():
            if worker.pipeline in pipelines and stage in (None, worker.stage):
                yield e.peer_of(worker, incarnation)

    def silent(self, now: float) -> list[tuple[Worker, int, float]]:
        """Who has been silent for too long, and for how many seconds; call it when :attr:`next_look` has come."""
        if now - self.next_look > self._limit / 4:
            # We were away ourselves (a machine asleep, a stopped process): first hear what has come meanwhile.
            logger.warning("the scheduler was held up for %.1f s; nobody is called lost for that", now - self.next_look)
            self._heard = dict.fromkeys(self._heard, now)
        late = [
            (w, self.incarnations[w], now - heard) for w, heard in self._heard.items() if now - heard >= self._limit
        ]
        others = [heard for heard in self._heard.values() if now - heard < self._limit]
        self.next_look = min(others) + self._limit if others else math.inf
        return late
