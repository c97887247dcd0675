"""What all replicas of a stage do together, by the collectives of their process group: gloo's are faster than messages
of our own when all take part."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.exchange.moving import Pending, Scratch, pieces_of
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas

Collect = Callable[[Tensor, Tensor], None]


class FullMean:
    """The mean over all replicas, weighted as the group says, which has them all; of integers (counters) the largest.

    Args:
        replicas: of which this worker is one.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """See :class:`~lightning_sdpipe.exchange.moving.Mover`."""
        weights = {worker.pipeline: weight for worker, weight in zip(group.members, group.weights, strict=True)}
        weight = weights[self._replicas.pipeline]

        def collect(piece: Tensor, beside: Tensor) -> None:
            floating = piece.is_floating_point()
            torch.mul(piece, weight, out=beside) if floating else beside.copy_(piece)
            operation = dist.ReduceOp.SUM if floating else dist.ReduceOp.MAX
            dist.all_reduce(beside, operation, group=self._replicas.group)

        return _Collective(tensors, collect, self._replicas, "averaging")


class TakeOver:
    """All replicas take over the model of the one that has all the weight in the group.

    Args:
        replicas: of which this worker is one.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """See :class:`~lightning_sdpipe.exchange.moving.Mover`."""
        source = group.members[group.weights.index(1.0)].pipeline

        def collect(piece: Tensor, beside: Tensor) -> None:
            if source == self._replicas.pipeline:
                beside.copy_(piece)
            dist.broadcast(beside, group=self._replicas.group, group_src=self._replicas.ranks[source])

        return _Collective(tensors, collect, self._replicas, "taking over a model")


class _Collective:
    def __init__(self, tensors: Sequence[Tensor], collect: Collect, replicas: Replicas, purpose: str) -> None:
        self.seconds_waiting = 0.0
        self._to_come = deque(pieces_of(tensors))
        self._collect = collect
        self._replicas = replicas
        self._purpose = purpose
        self._scratch = Scratch()
        self._first = True

    def wait(self) -> bool:
        if not self._to_come:
            return False
        piece, start = self._to_come[0], time.perf_counter()
        self._memory = self._scratch.lend(len(piece), piece)
        self._beside = self._memory[: len(piece)]
        with waiting_for(self._replicas.group, self._purpose):
            self._collect(piece, self._beside)
        if self._first:
            self.seconds_waiting, self._first = time.perf_counter() - start, False
        return True

    def commit(self) -> None:
        self._to_come.popleft().copy_(self._beside)
        self._scratch.give_back(self._memory)

    def abort(self) -> None:
        self._to_come.clear()
