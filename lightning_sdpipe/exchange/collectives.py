"""Movers that use the collectives of the process group of all replicas of a stage: gloo's collectives are faster than
our own messages when all take part."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.group_mean import GroupMean
from lightning_sdpipe.exchange.moving import Pending, PieceByPiece, Scratch
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas

Collect = Callable[[Tensor, Tensor], None]


class FullMean:
    """Computes the mean over all replicas, weighted as the group says, which has them all; of integers (counters) the
    largest.

    Args:
        replicas: replicas of which this worker is one.
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


class SumInPlace:
    """Adds up the tensors of a group's members, which weigh 1 each: by one collective if the members are the whole
    process group, else by messages among them. The tensors' values are lost if that fails.

    Args:
        replicas: replicas of which this worker is one.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self._among_some = GroupMean(replicas)

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """See :class:`~lightning_sdpipe.exchange.moving.Mover`."""
        if len(group.members) < len(self.replicas.pipelines) or any(map(self.replicas.stages, tensors)):
            return self._among_some.start(tensors, group)
        return _Sum(tensors, self.replicas)


class _Sum:
    def __init__(self, tensors: Sequence[Tensor], replicas: Replicas) -> None:
        self.seconds_waiting = 0.0
        size = len(replicas.pipelines)
        replicas.traffic.add(2 * (size - 1) * sum(tensor.nbytes for tensor in tensors) // size)
        self._replicas = replicas
        self._works = deque(replicas.group.allreduce([tensor]) for tensor in tensors)

    def wait(self) -> bool:
        if not self._works:
            return False
        start = time.perf_counter()
        try:
            self._works[0].wait()
        except RuntimeError as error:
            names = [self._replicas.name(pipeline) for pipeline in self._replicas.pipelines]
            raise WorkerFailedError(f"adding up with {names} failed: {str(error).splitlines()[0]}") from error
        self.seconds_waiting += time.perf_counter() - start
        return True

    def commit(self) -> None:
        self._works.popleft()

    def abort(self) -> None:
        self._works.clear()


class TakeOver:
    """Copies the model of the replica that has all the weight in the group to all replicas.

    Args:
        replicas: replicas of which this worker is one.
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


class _Collective(PieceByPiece):
    def __init__(self, tensors: Sequence[Tensor], collect: Collect, replicas: Replicas, purpose: str) -> None:
        super().__init__(tensors)
        self._collect, self._replicas, self._purpose = collect, replicas, purpose
        self._scratch = Scratch()

    def _compute(self, number: int, piece: Tensor) -> None:
        self._memory = self._scratch.lend(len(piece), piece)
        self._beside = self._memory[: len(piece)]
        with waiting_for(self._replicas.group, self._purpose):
            self._collect(piece, self._beside)

    def commit(self) -> None:
        self._to_come.popleft()[1].copy_(self._beside)
        self._scratch.give_back(self._memory)
