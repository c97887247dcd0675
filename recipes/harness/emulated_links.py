"""Emulated links: transfers between workers on one machine that take as long as over a given network.

Every worker gets a network card that sends one message at a time, in bytes / β of the link to its receiver, and starts
the real transfer α later. So messages to several receivers follow each other, as in DT-FM's cost, and latencies
overlap. Links of a terabyte per second or more are within a machine, and bypass the card. Measurements over these links
must be labelled *emulated*. Only messages between two processes are delayed: activations, gradients, and averaging in
groups, but not collectives.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.placement.network import Network

PATIENCE = 300.0
"""Most seconds that a message may be held."""
WITHIN_A_MACHINE = 1e12
"""Bytes per second from which on a link is within a machine."""


class Card:
    """The network card of this process.

    Args:
        latency: seconds from this rank to each rank.
        bandwidth: bytes per second from this rank to each rank.
    """

    def __init__(self, latency: Sequence[float], bandwidth: Sequence[float]) -> None:
        self._latency, self._bandwidth = latency, bandwidth
        self._free_at = 0.0
        self._queue: list[tuple[float, int, Held]] = []
        self._numbers = count()
        self._changed = threading.Condition()
        threading.Thread(target=self._deliver, daemon=True).start()

    def send(self, to: int, size: int, start: Callable[[], dist.Work]) -> Held:
        """Call ``start`` when a message of this many bytes would have arrived."""
        held = Held(start)
        with self._changed:
            sent_at = time.monotonic()
            if self._bandwidth[to] < WITHIN_A_MACHINE:
                sent_at = self._free_at = max(self._free_at, sent_at) + size / self._bandwidth[to]
            heapq.heappush(self._queue, (sent_at + self._latency[to], next(self._numbers), held))
            self._changed.notify()
        return held

    def _deliver(self) -> None:
        while True:
            with self._changed:
                while not self._queue or self._queue[0][0] > time.monotonic():
                    self._changed.wait(self._queue[0][0] - time.monotonic() if self._queue else None)
                _, _, held = heapq.heappop(self._queue)
            held.begin()


class Held:
    """A transfer that has not begun yet, with the interface of a ``dist.Work``."""

    def __init__(self, start: Callable[[], dist.Work]) -> None:
        self._start = start
        self._begun: Future[dist.Work] = Future()

    def begin(self) -> None:
        """Begin the real transfer."""
        try:
            self._begun.set_result(self._start())
        except Exception as error:  # wait() raises it
            self._begun.set_exception(error)

    def wait(self, limit: timedelta = timedelta(0)) -> None:
        """Wait until the receiver has taken the message; ``limit`` is for the real transfer."""
        if not wait([self._begun], PATIENCE).done:
            raise RuntimeError(f"an emulated link was busy for {PATIENCE:.0f} s")
        self._begun.result().wait(limit)


@contextmanager
def emulated_links(network: Network) -> Iterator[None]:
    """Within the context, make this process and those that it forks send over ``network``, whose device i is rank i."""
    latency, bandwidth = network.latency(), network.bandwidth()
    cards: dict[int, Card] = {}  # by rank, since a card's thread does not survive a fork
    real = dist.ProcessGroup.send

    def send(group: dist.ProcessGroup, tensors: list[Tensor], to: int, tag: int) -> Any:
        rank = dist.get_rank()
        if rank not in cards:
            cards[rank] = Card(latency[rank], bandwidth[rank])
        size = sum(tensor.nbytes for tensor in tensors)
        return cards[rank].send(dist.get_global_rank(group, to), size, lambda: real(group, tensors, to, tag))

    with mock.patch.object(dist.ProcessGroup, "send", send):
        yield
