"""Emulated links: transfers between workers of one machine that take as long as over a given network.

Every worker gets a network card that sends one message at a time, for bytes / β of the link to its receiver, and hands
it over to the real transfer α after that. So messages to several receivers follow each other, as DT-FM's cost has it,
and latencies overlap. What is measured over such links must be labelled *emulated*. Only what goes through
:mod:`lightning_sdpipe.p2p` is held up: activations, gradients, and averaging in groups; not collectives.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.placement.network import Network

PATIENCE = 300.0
"""Seconds that a message may take."""


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
        """Calls ``start`` when a message of so many bytes would have arrived."""
        held = Held(start)
        with self._changed:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._bandwidth[to]
            heapq.heappush(self._queue, (self._free_at + self._latency[to], next(self._numbers), held))
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
    """A transfer that has not begun yet; waits as a ``dist.Work`` does."""

    def __init__(self, start: Callable[[], dist.Work]) -> None:
        self._start = start
        self._begun = threading.Event()
        self._work: dist.Work | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Begins the real transfer."""
        try:
            self._work = self._start()
        except BaseException as error:  # raised where it is waited for
            self._error = error
        self._begun.set()

    def wait(self) -> None:
        """Until the receiver has taken it."""
        if not self._begun.wait(PATIENCE):
            raise RuntimeError(f"an emulated link was busy for {PATIENCE:.0f} s")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        assert self._work is not None
        self._work.wait()


@contextmanager
def emulated_links(network: Network) -> Iterator[None]:
    """Processes that are forked meanwhile, and this one, transfer over ``network``, whose device i is rank i."""
    latency, bandwidth = network.latency(), network.bandwidth()
    cards: dict[int, Card] = {}  # one of each process: a fork inherits none, since no thread survives it

    def card() -> Card:
        rank = dist.get_rank()
        if rank not in cards:
            cards[rank] = Card(latency[rank], bandwidth[rank])
        return cards[rank]

    def send(tensors: Sequence[Tensor], to: int, group: dist.ProcessGroup, tag: int, peer: str) -> p2p.Transfer:
        transfer = p2p.Transfer(peer)
        for tensor in tensors:
            payload = tensor.detach().contiguous()
            transfer.tensors.append(payload)
            if payload.numel():
                transfer.works.append(_held(payload, to, group, tag))
        return transfer

    def exchange(
        outgoing: Mapping[int, Tensor], into: Mapping[int, Tensor], group: dist.ProcessGroup, tag: int
    ) -> None:
        receives = {peer: dist.irecv(t, peer, group, tag) for peer, t in into.items() if t.numel()}
        sends = {peer: _held(t, peer, group, tag) for peer, t in outgoing.items() if t.numel()}
        for peer, work in (*receives.items(), *sends.items()):
            try:
                work.wait()
            except RuntimeError as error:
                raise WorkerFailedError(f"exchanging with rank {peer} failed: {error}") from error

    def _held(payload: Tensor, to: int, group: dist.ProcessGroup, tag: int) -> Any:
        return card().send(to, payload.nbytes, lambda: p2p._started(dist.isend(payload, to, group, tag)))

    real = p2p.send, p2p.exchange
    p2p.send, p2p.exchange = send, exchange
    try:
        yield
    finally:
        p2p.send, p2p.exchange = real
