"""Averaging of two workers' published tensors while they go on changing (asynchronous AD-PSGD).

Each sends a copy of a piece as it is now. The received copy does not replace the piece, which may have changed by then:
the difference of the two copies is added, times the other one's weight. With equal weights the sum over both stays the
same, whatever happens at the same time, and neither holds a lock while it waits for the other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.moving import Pending, pieces_of, tag_of
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas


class PairMean:
    """Moves tensors that other code changes meanwhile, under a lock.

    Args:
        replicas: replicas of which this worker is one; exchanges of several pairs may go on at the same time.
        lock: held while a piece is copied, and while it is committed.
    """

    def __init__(self, replicas: Replicas, lock: threading.Lock) -> None:
        self._replicas = replicas
        self._lock = lock

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """See :class:`~lightning_sdpipe.exchange.moving.Mover`; the group has two members."""
        return _Pair(tensors, group, self._replicas, self._lock)


class _Pair:
    def __init__(self, tensors: Sequence[Tensor], group: Group, replicas: Replicas, lock: threading.Lock) -> None:
        weights = {worker.pipeline: w for worker, w in zip(group.members, group.weights, strict=True)}
        (self._other,) = set(weights) - {replicas.pipeline}
        self.seconds_waiting = 0.0
        self._weight = weights[self._other]
        self._replicas = replicas
        self._lock = lock
        self._tag = tag_of(group)
        self._to_come = deque(pieces_of(tensors))
        self._first = True

    def wait(self) -> bool:
        if not self._to_come:
            return False
        start = time.perf_counter()
        with self._lock:
            self._mine = self._to_come[0].clone()
        self._theirs = torch.empty_like(self._mine)
        outgoing, into = {self._other: self._mine}, {self._other: self._theirs}
        transfers.begin(outgoing, into, self._replicas, self._tag).wait()
        if self._first:
            self.seconds_waiting, self._first = time.perf_counter() - start, False
        return True

    def commit(self) -> None:
        piece = self._to_come.popleft()
        with self._lock:
            piece.add_(self._theirs.sub_(self._mine), alpha=self._weight)

    def abort(self) -> None:
        self._to_come.clear()
