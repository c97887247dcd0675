"""Averages with the two neighbours in a ring whose members come and go.

In full precision it is the average of :mod:`~lightning_sdpipe.exchange.ring_mean`, with weights for as many members as
the group has. In low precision, too, each worker keeps copies of its own model and of its neighbours' models, which
messages change. A copy is of use if both ends of it have added the same messages. So before each exchange two
neighbours tell each other, in 8 bytes, which was the last one that they have ended together. Where they name different
ones, or none, they are new to each other, and each sends the other the copy of its own model in full. If none of its
neighbours knows its copy, a worker makes a new one of its model. An exchange that breaks off leaves no copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.moving import Pending
from lightning_sdpipe.exchange.ring_mean import NeighbourCopies, RingCopies, RingExchange, weight_of_each
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas

_NONE = -1
"""Number in the place of an exchange where there was none."""


class ChangingRing:
    """Gives each member of a group its average with its neighbours, as ``Group.neighbours`` names them.

    Args:
        replicas: replicas of which this worker is one.
        memory: its copies, from one process group to the next.
    """

    def __init__(self, replicas: Replicas, memory: RingCopies) -> None:
        self._replicas, self._memory = replicas, memory

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """See :class:`~lightning_sdpipe.exchange.moving.Mover`.

        Raises:
            ConfigurationError: a group of several members has no neighbours.
        """
        return _Exchange(self._replicas, self._memory, tensors, group, weight_of_each(len(group.members)))


class _Exchange(RingExchange):
    _known: set[int] | None = None

    def commit(self) -> None:
        super().commit()
        if not self._to_come and self._memory.payload is not None:
            self._memory.ended_with = dict.fromkeys(self.neighbours, self._tag)

    def _copies(self, number: int, piece: Tensor) -> NeighbourCopies:
        """Return the copies of a piece, after new neighbours have been sent that of this worker."""
        memory = self._memory
        if self._known is None:
            if [len(of_piece.own) for of_piece in memory.of_pieces] != [len(of_piece) for _, of_piece in self._to_come]:
                memory.forget()  # of layers that have been frozen or unfrozen since
            self._known = self._compare()
            if not self._known:
                memory.forget()
            memory.leave(self._known)
        if number == len(memory.of_pieces):
            memory.add(NeighbourCopies(piece, {}, self._weight))
        copies = memory.of_pieces[number]
        copies.weight = self._weight
        copies.neighbours |= self._swap(copies.own, [i for i in self.neighbours if i not in self._known])
        return copies

    def _compare(self) -> set[int]:
        """Return the neighbours that have ended the same exchange with this worker last as it with them."""
        mine = {i: torch.tensor([self._memory.ended_with.get(i, _NONE)]) for i in self.neighbours}
        theirs = {i: torch.empty_like(number) for i, number in mine.items()}
        transfers.begin(mine, theirs, self._replicas, self._tag).wait()
        return {i for i, number in mine.items() if int(number) == int(theirs[i]) != _NONE}
