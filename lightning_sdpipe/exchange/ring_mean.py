"""The average with the two neighbours of a ring: in full precision by models, else by the changes of replicas
(:mod:`~lightning_sdpipe.exchange.algorithms.ring`)."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.algorithms import ring
from lightning_sdpipe.exchange.common_reference import BROKEN_OFF
from lightning_sdpipe.exchange.moving import Pending, pieces_of, tag_of
from lightning_sdpipe.exchange.payloads import ErrorFeedback, Payload
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas


class RingMean:
    """Gives each member of a group its average with its neighbours, as ``Group.neighbours`` names them.

    Memory, unless in full precision: three models, and a residual if the payload has feedback.

    Args:
        replicas: of which this worker is one.
        payload: ``Half`` or ``EightBit``; None for full precision.
    """

    def __init__(self, replicas: Replicas, payload: Payload | None) -> None:
        self.replicas = replicas
        self.payload = payload
        self.weight = ring.weight_of_each(len(replicas.ranks))
        self.copies: list[ring.NeighbourCopies] = []
        self.residuals: list[ErrorFeedback] = []
        self.draws = random.Random(replicas.pipeline)

    def begin(self, tensors: Sequence[Tensor], neighbours: Sequence[int]) -> None:
        """All workers have the same ``tensors`` now, and these are this one's neighbours."""
        if self.payload is None:
            return
        self.copies = [ring.NeighbourCopies(p, dict.fromkeys(neighbours, p), self.weight) for p in pieces_of(tensors)]
        self.residuals = [ErrorFeedback(p) for p in pieces_of(tensors)] if self.payload.feedback else []

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """See :class:`~lightning_sdpipe.exchange.moving.Mover`.

        Raises:
            ConfigurationError: a group of several without neighbours.
        """
        members = [worker.pipeline for worker in group.members]
        if len(members) > 1 and not group.neighbours:
            raise ConfigurationError(
                f"group {group.sequence} names no neighbours ({group.reason}), as a ring needs them. Leave out "
                "Decentralized('ring') for a policy that does not."
            )
        beside = group.neighbours[members.index(self.replicas.pipeline)] if group.neighbours else ()
        return _Ring(self, tensors, [worker.pipeline for worker in beside], tag_of(group))


class _Ring:
    def __init__(self, mover: RingMean, tensors: Sequence[Tensor], neighbours: Sequence[int], tag: int) -> None:
        self.seconds_waiting = 0.0
        self._mover = mover
        self._neighbours = neighbours
        self._tag = tag
        self._to_come = deque(enumerate(pieces_of(tensors)))
        self._first = True
        for copies in mover.copies:
            for gone in copies.neighbours.keys() - {*neighbours}:
                copies.leave(gone)

    def wait(self) -> bool:
        if not self._to_come:
            return False
        start = time.perf_counter()
        number, piece = self._to_come[0]
        payload = self._mover.payload
        if payload is None:
            theirs = self._swap(piece, piece)
            self._beside = piece.clone()
            ring.average(self._beside, [theirs[neighbour] for neighbour in self._neighbours], self._mover.weight)
        else:
            if not self._mover.copies:
                raise WorkerFailedError(BROKEN_OFF)
            z = self._mover.copies[number].difference(piece)
            residual = self._mover.residuals[number].residual if self._mover.residuals else None
            self._mine = payload.on(piece.dtype).message(z, residual, self._mover.draws.getrandbits(32))
            self._theirs = self._swap(self._mine, self._mine)
        if self._first:
            self.seconds_waiting, self._first = time.perf_counter() - start, False
        return True

    def commit(self) -> None:
        number, piece = self._to_come.popleft()
        if self._mover.payload is None:
            piece.copy_(self._beside)
            return
        copies = self._mover.copies[number]
        copies.commit(self._mover.payload.on(piece.dtype), self._mine, self._theirs)
        piece.copy_(copies.own)

    def abort(self) -> None:
        """A neighbour may have changed replicas that this worker has not: none are common until ``begin``."""
        if self._to_come:
            self._mover.copies, self._mover.residuals = [], []
        self._to_come.clear()

    def _swap(self, mine: Tensor, like: Tensor) -> dict[int, Tensor]:
        into = {neighbour: torch.empty_like(like) for neighbour in self._neighbours}
        transfers.begin(dict.fromkeys(into, mine), into, self._mover.replicas, self._tag).wait()
        return into
