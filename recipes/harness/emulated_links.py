"""Emulated links: transfers between workers of one machine that take as long as over a given network.

Every worker gets a network card that sends one message at a time, for bytes / β of the link to its receiver, and hands
it over to the real transfer α after that. So messages to several receivers follow each other, as DT-FM's cost has it,
and latencies overlap. Links of a terabyte per second and more lie within a machine, and pass the card by. What is
measured over such links must be labelled *emulated*. Only what one process sends to one other is held up: activations,
gradients, and averaging in groups; not collectives.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.placement.network import Network

PATIENCE = 300.0
"""Seconds that a message may take."""
WITHIN_A_MACHINE = 1e12
"""Bytes per second."""


class Card:
    """The network card of this process.

    Args:
        latency: seconds from this rank to each.
        bandwidth: bytes per second, likewise.
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
        self._begun = threading.Event()
        self._work: dist.Work | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        """Begin the real transfer."""
        try:
            self._work = self._start()
        except Exception as error:  # raised where it is waited for
            self._error = error
        self._begun.set()

    def wait(self, limit: timedelta = timedelta(0)) -> None:
        """Wait until the receiver has taken it; ``limit`` is that of the real transfer."""
        if not self._begun.wait(PATIENCE):
            raise RuntimeError(f"an emulated link was busy for {PATIENCE:.0f} s")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        assert self._work is not None
        self._work.wait(limit)


@contextmanager
def emulated_links(network: Network) -> Iterator[None]:
    """Make this process, and those that it forks meanwhile, send over ``network``, whose device i is rank i."""
    latency, bandwidth = network.latency(), network.bandwidth()
    cards: dict[int, Card] = {}  # one of each process: a fork inherits none, since no thread survives it
    real = dist.ProcessGroup.send

    def send(group: dist.ProcessGroup, tensors: list[Tensor], to: int, tag: int) -> Any:
        rank = dist.get_rank()
        if rank not in cards:
            cards[rank] = Card(latency[rank], bandwidth[rank])
        size = sum(tensor.nbytes for tensor in tensors)
        return cards[rank].send(dist.get_global_rank(group, to), size, lambda: real(group, tensors, to, tag))

    with mock.patch.object(dist.ProcessGroup, "send", send):
        yield
