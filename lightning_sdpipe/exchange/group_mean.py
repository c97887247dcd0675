"""The weighted mean of models over the members of a group, over links that already exist.

A group of k workers changes from iteration to iteration, and making a communicator for it costs more than the averaging
(tens of milliseconds on gloo). So its members reduce and gather with point-to-point transfers inside the process group
of their stage: each averages one k-th of a piece, which the others send it, and sends them the result. Each sends 2 (k
− 1) / k times the tensors, as in a ring, but in two steps instead of 2 (k − 1), which matters where tensors are short
or processes wait for a core.

The others' parts of a member's own k-th lie where the results of the other k-ths will arrive, so a piece needs memory
of its own size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.moving import Pending, Scratch, pieces_of, refuse_neighbours, tag_of
from lightning_sdpipe.exchange.transfers import Transfers
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas

_BLOCK = 2**16  # elements that are added up at once, since they fit into a processor's cache


class GroupMean:
    """Gives all members of a group the sum of their tensors, weighted as the group says: the same, bit for bit.

    Args:
        replicas: replicas of which this worker is one.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._scratch = Scratch()

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """See :class:`~lightning_sdpipe.exchange.moving.Mover`.

        Raises:
            ConfigurationError: the group has members that average with some of the others only.
        """
        refuse_neighbours(group)
        return _Mean(tensors, group, self._replicas, self._scratch)


class _Mean:
    def __init__(self, tensors: Sequence[Tensor], group: Group, replicas: Replicas, scratch: Scratch) -> None:
        members = [worker.pipeline for worker in group.members]
        place = members.index(replicas.pipeline)
        self.seconds_waiting = 0.0
        self._others = [*members[place + 1 :], *members[:place]]  # so that members begin with different ones
        self._place = {pipeline: number for number, pipeline in enumerate(members)}
        self._weights = dict(zip(members, group.weights, strict=True))
        self._replicas = replicas
        self._tag = tag_of(group)
        self._lender = scratch
        self._to_come = deque(pieces_of(tensors) if self._others else ())
        self._first = True
        self._scattering: Transfers | None = None
        self._begin()

    def wait(self) -> bool:
        if self._scattering is None:
            return False
        start = time.perf_counter()
        self._scattering.wait()
        if self._first:
            self.seconds_waiting, self._first = time.perf_counter() - start, False
        self._add_up()
        results = {pipeline: self._slots[self._place[pipeline]] for pipeline in self._others}
        transfers.begin(dict.fromkeys(results, self._mean), results, self._replicas, self._tag).wait()
        return True

    def commit(self) -> None:
        torch._foreach_copy_(self._chunks, self._slots)
        self._lender.give_back(self._scratch)
        self._begin()

    def abort(self) -> None:
        self._to_come.clear()
        self._scattering = None  # transfers under way may still write into the scratch memory, so it is let go

    def _add_up(self) -> None:
        own, *others = [self._weights[p] for p in (self._replicas.pipeline, *self._parts)]
        block = _BLOCK if self._mean.is_cpu else max(1, len(self._mean))
        columns = [tensor.split(block) for tensor in (self._mean, self._chunk, *self._parts.values())]
        for mean, chunk, *parts in zip(*columns, strict=True):
            torch.mul(chunk, own, out=mean)
            for part, weight in zip(parts, others, strict=True):
                mean.add_(part, alpha=weight)

    def _begin(self) -> None:
        """Send the others their parts of the next piece, if there is one."""
        self._scattering = None
        if not self._to_come:
            return
        piece = self._to_come.popleft()
        size = len(self._others) + 1
        self._chunks = torch.tensor_split(piece, size)  # the first is as long as any, and one longer than the last
        longest = len(self._chunks[0])
        self._scratch = self._lender.lend(size * longest, piece)
        slots = self._scratch[: size * longest].view(size, longest)
        self._slots = [slot[: len(chunk)] for slot, chunk in zip(slots, self._chunks, strict=True)]
        own = self._place[self._replicas.pipeline]
        self._chunk, self._mean = self._chunks[own], self._slots[own]
        self._parts = {pipeline: slots[self._place[pipeline]][: len(self._chunk)] for pipeline in self._others}
        outgoing = {pipeline: self._chunks[self._place[pipeline]] for pipeline in self._others}
        self._scattering = transfers.begin(outgoing, self._parts, self._replicas, self._tag)
