"""Averaging of two workers' published tensors while they go on changing (asynchronous AD-PSGD).

Each sends a copy of a piece as it is now. The received copy does not replace the piece, which may have changed by then:
the difference of the two copies is added, times the other one's weight. With equal weights the sum over both stays the
same, whatever happens at the same time, and neither holds a lock while it waits for the other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.moving import Pending, PieceByPiece, finish_whole, tag_of
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


class _Pair(PieceByPiece):
    def __init__(self, tensors: Sequence[Tensor], group: Group, replicas: Replicas, lock: threading.Lock) -> None:
        weights = {worker.pipeline: w for worker, w in zip(group.members, group.weights, strict=True)}
        (self._other,) = set(weights) - {replicas.pipeline}
        super().__init__(tensors)
        self._weight = weights[self._other]
        self._replicas, self._lock, self._tag = replicas, lock, tag_of(group)

    def _compute(self, number: int, piece: Tensor) -> Tensor:
        with self._lock:
            mine = piece.clone()
        theirs = torch.empty_like(mine)
        transfers.begin({self._other: mine}, {self._other: theirs}, self._replicas, self._tag).wait()
        return theirs.sub_(mine)

    def _put(self, number: int, piece: Tensor, outcome: Tensor) -> None:
        with self._lock:
            piece.add_(outcome, alpha=self._weight)


def exchange_whole(pending: Pending, group: Group, replicas: Replicas) -> None:
    """Finish the exchange of the pair ``group``: neither changes its tensors before both have all of it.

    Raises:
        WorkerFailedError: the other one is gone, or a transfer has timed out; nothing has changed.
    """
    (other,) = {worker.pipeline for worker in group.members} - {replicas.pipeline}

    def confirm() -> None:
        word = torch.zeros(1)
        transfers.begin({other: word}, {other: torch.empty_like(word)}, replicas, tag_of(group)).wait()

    finish_whole(pending, confirm)
