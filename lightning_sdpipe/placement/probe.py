"""Measurement of the link between two processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

PINGS, WARM_UP = 32, 4
SMALLEST, LARGEST = 2**16, 2**27
"""Bytes of the smaller of the two messages between which the slope is taken."""

LEAST_SECONDS = 0.05
"""Least time of a message whose time is determined by its bytes."""

REPEATS = 4
"""Number of repeats, of which the quickest counts: other load on a machine only slows messages down."""


class Wire(Protocol):
    """Two ends that send tensors to each other and wait for them."""

    def send(self, tensor: Tensor) -> None: ...

    def receive(self, tensor: Tensor) -> None: ...


class GlooWire:
    """A connection of this process to one other, over gloo.

    Args:
        store: a store that both processes reach.
        name: name of the pair, known to both.
        leads: True on one of the two.
        timeout: limit for making the connection, and for every transfer.

    Raises:
        RuntimeError: the connection cannot be made.
    """

    def __init__(self, store: Store, name: str, leads: bool, timeout: timedelta) -> None:
        self._other = 1 if leads else 0
        self._group: Any = ProcessGroupGloo(PrefixStore(name, store), 1 - self._other, 2, timeout)

    def send(self, tensor: Tensor) -> None:
        self._group.send([tensor], self._other, 0).wait()

    def receive(self, tensor: Tensor) -> None:
        self._group.recv([tensor], self._other, 0).wait()


def latency(wire: Wire, leads: bool, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds for 8 bytes in one direction: half the median of ping-pongs, on the side that leads; 0 on the
    other."""
    token = torch.zeros(1, dtype=torch.int64)
    trips = []
    for _ in range(WARM_UP + PINGS):
        if leads:
            start = clock()
            wire.send(token)
            wire.receive(token)
            trips.append(clock() - start)
        else:
            wire.receive(token)
            wire.send(token)
    return median(trips[WARM_UP:]) / 2 if leads else 0.0


def bandwidth(wire: Wire, leads: bool, outward: bool, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return bytes per second, from the side that leads if ``outward``, else to it; 0 on the other side.

    The size is doubled until a message takes :data:`LEAST_SECONDS`; then the slope between that size and twice that
    size counts, so that neither latency nor the capacity of a buffer matters.
    """
    if not leads:
        _follow(wire, outward)
        return 0.0
    size = SMALLEST
    while _timed(wire, size, outward, clock) < LEAST_SECONDS and size < LARGEST:
        size *= 2
    short, long = (min(_timed(wire, amount, outward, clock) for _ in range(REPEATS)) for amount in (size, 2 * size))
    wire.send(torch.zeros(1, dtype=torch.int64))
    mean = 2 * size / long
    return min(size / (long - short), 2 * mean) if long > short else mean  # a slope far above the mean is noise


def _timed(wire: Wire, size: int, outward: bool, clock: Callable[[], float]) -> float:
    token, payload = torch.tensor([size]), _payload(size)
    start = clock()
    wire.send(token)
    if outward:
        wire.send(payload)
        wire.receive(token)
    else:
        wire.receive(payload)
    return clock() - start


def _follow(wire: Wire, outward: bool) -> None:
    token = torch.zeros(1, dtype=torch.int64)
    while True:
        wire.receive(token)
        if not token:
            return
        payload = _payload(int(token))
        if outward:
            wire.receive(payload)
            wire.send(token)
        else:
            wire.send(payload)


@lru_cache(maxsize=2)
def _payload(size: int) -> Tensor:
    """Return a tensor of ``size`` bytes, the same each time: fresh memory would first have to be mapped."""
    return torch.zeros(size, dtype=torch.uint8)
