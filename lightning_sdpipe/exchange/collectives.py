"""Exchanges by collectives of the process group of all replicas of a stage: gloo's are faster than messages of our own
when all take part."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.moving import GroupMean, Pending, Scratch, pieces_of
from lightning_sdpipe.exchange.transfers import name_of
from lightning_sdpipe.p2p import labelled, through_host, waiting_for
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas

_LOOK = timedelta(seconds=0.25)
"""Time between two looks at whether a group was given up."""


def average_all(
    tensors: Sequence[Tensor], replicas: Replicas, weights: Sequence[float] | Mapping[int, float] | None = None
) -> None:
    """Give all ``replicas``, which are together, the mean of their tensors; of integers (counters) the largest.

    Args:
        tensors: contiguous tensors, of the same lengths on all of them.
        replicas: all replicas, of which this worker is one.
        weights: weight of each pipeline; None for equal ones.

    Raises:
        WorkerFailedError: a replica is gone, or the group's timeout passed.
    """
    weight = 1 / len(replicas.pipelines) if weights is None else weights[replicas.pipeline]

    def collect(piece: Tensor, beside: Tensor) -> None:
        floating = piece.is_floating_point()
        torch.mul(piece, weight, out=beside) if floating else beside.copy_(piece)
        operation = dist.ReduceOp.SUM if floating else dist.ReduceOp.MAX
        dist.all_reduce(beside, operation, group=replicas.group)

    _by_pieces(tensors, replicas, "averaging", collect)


def take_over(tensors: Sequence[Tensor], replicas: Replicas, source: int) -> None:
    """Give all ``replicas``, which are together, the tensors of pipeline ``source``; see :func:`average_all`."""

    def collect(piece: Tensor, beside: Tensor) -> None:
        if source == replicas.pipeline:
            beside.copy_(piece)
        dist.broadcast(beside, group=replicas.group, group_src=replicas.ranks[source])

    _by_pieces(tensors, replicas, "taking over a model", collect)


def _by_pieces(
    tensors: Sequence[Tensor], replicas: Replicas, purpose: str, collect: Callable[[Tensor, Tensor], None]
) -> None:
    """Collect each piece beside the tensors, and copy it into them when it is whole."""
    scratch = Scratch()
    with labelled("exchange"):
        for piece in pieces_of(tensors):
            memory = scratch.lend(len(piece), piece)
            with waiting_for(replicas.group, purpose):
                collect(piece, memory[: len(piece)])
            piece.copy_(memory[: len(piece)])
            scratch.give_back(memory)


class SumInPlace:
    """Adds up the tensors of a group's members, which weigh 1 each: by one collective if the members are the whole
    process group, else by messages among them. The tensors' values are lost if that fails.

    Args:
        replicas: replicas of which this worker is one.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self._among_some = GroupMean(replicas)
        self._under_way: list[dist.Work] = []

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        members, replicas = len(self.replicas.pipelines), self.replicas
        if len(group.members) < members or any(through_host(each, replicas.group) for each in tensors):
            return self._among_some.start(tensors, group)
        replicas.traffic.add(2 * (members - 1) * sum(tensor.nbytes for tensor in tensors) // members)
        works = [replicas.group.allreduce([tensor]) for tensor in tensors]
        self._under_way = [*(work for work in self._under_way if not work.is_completed()), *works]
        return _Sum(works, self)

    def wait(self, work: dist.Work) -> None:
        """Wait until ``work`` is done, or soon after the replicas have given their group up: when a connection is lost,
        gloo does not fail a collective that awaits the message that was under way.

        Raises:
            WorkerFailedError: a member is gone, or the group is given up.
        """
        connections = self.replicas.connections
        try:
            while not _is_done(work, None if connections is None else _LOOK):
                if connections is not None and connections.given_up.is_set():
                    raise RuntimeError("the process group is given up")
        except RuntimeError as error:
            left = [each for each in self._under_way if not each.is_completed()]
            if left:  # which the destructor of their group would wait for; it is not called while a thread runs
                threading.Thread(target=_outlast, args=[left, self.replicas.group], daemon=True).start()
            names = [name_of(self.replicas, pipeline) for pipeline in self.replicas.pipelines]
            raise WorkerFailedError(f"adding up with {names} failed: {str(error).splitlines()[0]}") from error


def _is_done(work: dist.Work, within: timedelta | None) -> bool:
    """Wait for ``work``; return False if that takes longer."""
    try:
        work.wait(within or timedelta(0))
    except RuntimeError:
        if within is None:
            raise
        if not work.is_completed():
            return False
        work.wait()  # again, since it may have succeeded after that time, but before it was looked at
    return True


def _outlast(works: Sequence[dist.Work], group: dist.ProcessGroup) -> None:
    for work in works:
        with suppress(RuntimeError):
            work.wait()
    del group


class _Sum:
    def __init__(self, works: Sequence[dist.Work], mover: SumInPlace) -> None:
        self.seconds_waiting = 0.0
        self._works, self._mover = deque(works), mover

    def wait(self) -> bool:
        if not self._works:
            return False
        start = time.perf_counter()
        self._mover.wait(self._works[0])
        self.seconds_waiting += time.perf_counter() - start
        return True

    def commit(self) -> None:
        self._works.popleft()

    def abort(self) -> None:
        self._works.clear()
