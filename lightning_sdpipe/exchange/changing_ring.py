"""Averages with the two neighbours in a ring whose members come and go.

In full precision it is the average of :mod:`~lightning_sdpipe.exchange.ring_mean`, with weights for as many members as
the group has. In low precision, too, each worker keeps copies of its own model and of its neighbours' models, which
messages change. A copy is of use if both ends of it have added the same messages. So before each exchange two
neighbours tell each other, in 8 bytes, which was the last one that they have ended together. Where they name different
ones, or none, they are new to each other, and each sends the other the copy of its own model in full. If none of its
neighbours knows its copy, a worker makes a new one of its model. An exchange that breaks off leaves no copies.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.moving import Pending, pieces_of, tag_of
from lightning_sdpipe.exchange.payloads import ErrorFeedback, Payload
from lightning_sdpipe.exchange.ring_mean import NeighbourCopies, average, neighbours_of, weight_of_each
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas

_NONE = -1
"""Number in the place of an exchange where there was none."""


class RingCopies:
    """One worker's copies, from one process group to the next.

    Memory, unless in full precision: three models, and a residual if the payload has feedback.

    Args:
        payload: ``Half`` or ``EightBit``; None for full precision.
        seed: seed of stochastic rounding, different on each worker.
    """

    def __init__(self, payload: Payload | None, seed: int) -> None:
        self.payload = payload
        self.draws = random.Random(seed)
        self.of_pieces: list[NeighbourCopies] = []
        self.residuals: list[ErrorFeedback] = []
        self.ended_with: dict[int, int] = {}
        """Sequence of the last exchange that was ended with each neighbour."""

    def forget(self) -> None:
        """Let go of all copies, as when models have been made equal: the next exchange begins with new ones."""
        self.of_pieces, self.residuals, self.ended_with = [], [], {}

    def keep(self, neighbours: set[int]) -> None:
        """Let go of all copies but those that ``neighbours`` know, too; and of all if there are none."""
        if not neighbours:
            self.forget()
        for copies in self.of_pieces:
            for gone in copies.neighbours.keys() - neighbours:
                copies.leave(gone)


class ChangingRing:
    """Gives each member of a group its average with its neighbours, as ``Group.neighbours`` names them.

    Args:
        replicas: replicas of which this worker is one.
        memory: its copies.
    """

    def __init__(self, replicas: Replicas, memory: RingCopies) -> None:
        self.replicas, self.memory = replicas, memory

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """See :class:`~lightning_sdpipe.exchange.moving.Mover`.

        Raises:
            ConfigurationError: a group of several members has no neighbours.
        """
        return _Exchange(self, tensors, neighbours_of(group, self.replicas.pipeline), group)


class _Exchange:
    def __init__(self, mover: ChangingRing, tensors: Sequence[Tensor], neighbours: Sequence[int], group: Group) -> None:
        self.seconds_waiting = 0.0
        self._replicas, self._memory = mover.replicas, mover.memory
        self._neighbours, self._sequence, self._tag = neighbours, group.sequence, tag_of(group)
        self._weight = weight_of_each(len(group.members))
        self._to_come = deque(enumerate(pieces_of(tensors)))
        self._known: set[int] | None = None
        self._first = True

    def wait(self) -> bool:
        if not self._to_come:
            return False
        start = time.perf_counter()
        number, piece = self._to_come[0]
        payload = self._memory.payload
        if payload is None:
            theirs = self._swap(piece, self._neighbours)
            self._beside = piece.clone()
            average(self._beside, [theirs[neighbour] for neighbour in self._neighbours], self._weight)
        else:
            copies = self._copies(number, piece)
            z = copies.difference(piece)
            residual = self._memory.residuals[number].residual if payload.feedback else None
            self._mine = payload.on(piece.dtype).message(z, residual, self._memory.draws.getrandbits(32))
            self._theirs = self._swap(self._mine, self._neighbours)
        if self._first:
            self.seconds_waiting, self._first = time.perf_counter() - start, False
        return True

    def commit(self) -> None:
        number, piece = self._to_come.popleft()
        if self._memory.payload is None:
            piece.copy_(self._beside)
            return
        copies = self._memory.of_pieces[number]
        copies.commit(self._memory.payload.on(piece.dtype), self._mine, self._theirs)
        piece.copy_(copies.own)
        if not self._to_come:
            self._memory.ended_with = dict.fromkeys(self._neighbours, self._sequence)

    def abort(self) -> None:
        if self._to_come:
            self._memory.forget()
        self._to_come.clear()

    def _copies(self, number: int, piece: Tensor) -> NeighbourCopies:
        """Return the copies of a piece, after new neighbours have been sent that of this worker."""
        memory = self._memory
        if self._known is None:
            if [len(of_piece.own) for of_piece in memory.of_pieces] != [len(of_piece) for _, of_piece in self._to_come]:
                memory.forget()  # of layers that have been frozen or unfrozen since
            self._known = self._compare()
            memory.keep(self._known)
        if number == len(memory.of_pieces):
            memory.of_pieces.append(NeighbourCopies(piece, {}, self._weight))
            memory.residuals += [ErrorFeedback(piece)] if memory.payload and memory.payload.feedback else []
        copies = memory.of_pieces[number]
        copies.weight = self._weight
        copies.neighbours |= self._swap(copies.own, [i for i in self._neighbours if i not in self._known])
        return copies

    def _compare(self) -> set[int]:
        """Return the neighbours that have ended the same exchange with this worker last as it with them."""
        mine = {i: torch.tensor([self._memory.ended_with.get(i, _NONE)]) for i in self._neighbours}
        theirs = {i: torch.empty_like(number) for i, number in mine.items()}
        transfers.begin(mine, theirs, self._replicas, self._tag).wait()
        return {i for i, number in mine.items() if int(number) == int(theirs[i]) != _NONE}

    def _swap(self, mine: Tensor, neighbours: Sequence[int]) -> dict[int, Tensor]:
        into = {neighbour: torch.empty_like(mine) for neighbour in neighbours}
        transfers.begin(dict.fromkeys(into, mine), into, self._replicas, self._tag).wait()
        return into
