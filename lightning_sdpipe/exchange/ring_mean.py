"""Averages with the two neighbours in a ring (BAGUA §3.2, D_FP_S and D_LP_S).

In full precision, x ← Σ over itself and its neighbours of ⅓ x; in a ring of two, ½ and ½. The weights are symmetric, so
the mean over the ring stays.

In low precision each worker keeps copies x̂ of its own model and of its neighbours' models, which only messages change.
After its optimizer has made x of x̂, a worker sends

    Q(z),  z = x + Σ over neighbours of w x̂_j − (1 + Σ w) x̂

and all three that keep its x̂ add Q(z) to it; its model then is its x̂ (DCD-PSGD, Tang et al. 2018). With an exact Q
that is the formula above, with the neighbours' models as they were before this step. The paper's printed D_LP_S sends
Q(x) without a reference, whose errors do not fade, and does not converge.

The mean over the ring drifts by the mean of the errors of Q; with a residual for error feedback it does not drift
beyond that residual. Q must be close: 8 or 16 bits. The part of z that is left out is lost or, with feedback, comes
late: on quadratics, the largest quarter of the values with feedback made models grow without bound, and signs without
it stayed away from the optimum.

A copy is of use only if both ends have added the same messages to it. Members that all begin with one model have copies
of it, and later of those that were their neighbours in the exchange before; others are new to each other. Where an
exchange may end for some only, as where members come and go, two neighbours tell each other before each exchange, in 8
bytes, which exchange they last ended together; where they name different ones, or none, they are new. New neighbours
send each other the copies of their own models in full. If none of its neighbours knows its copy, a worker makes a new
one of its model. An exchange that breaks off leaves no copies.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.moving import Pending, PieceByPiece, pieces_of, tag_of
from lightning_sdpipe.exchange.payloads import ErrorFeedback, Payload
from lightning_sdpipe.exchange.payloads.payload import residual_dtype
from lightning_sdpipe.exchange.references import BROKEN_OFF
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas


class RingMean:
    """Gives each member of a group its average with its neighbours, as ``Group.neighbours`` names them.

    Args:
        replicas: replicas of which this worker is one.
        copies: this worker's, which outlast process groups.
    """

    def __init__(self, replicas: Replicas, copies: RingCopies) -> None:
        self._replicas, self._copies = replicas, copies

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """Start the exchange.

        Raises:
            ConfigurationError: a group of several members has no neighbours.
        """
        return _Exchange(self._replicas, self._copies, tensors, group)


class RingCopies:
    """One worker's copies of its own model and of its neighbours' models, piece by piece.

    Memory, unless in full precision: three models, and a residual if the payload has feedback.

    Args:
        payload: ``Half`` or ``EightBit``; None for full precision.
        seed: seed of stochastic rounding, different on each worker.
        changes: whether members come and go, so that neighbours compare what they have; else all begin with one model.
    """

    def __init__(self, payload: Payload | None, seed: int, changes: bool = False) -> None:
        self.payload, self.changes = payload, changes
        self.draws = random.Random(seed)
        self.of_pieces: list[NeighbourCopies] = []
        self.residuals: list[ErrorFeedback] = []
        self.ended_with: dict[int, int] = {}
        """Sequence of the last exchange that was ended with each neighbour."""
        self.is_common = False
        """Whether all other workers' copies equal this one's own, since nothing was exchanged after :meth:`begin`."""

    def add(self, copies: NeighbourCopies) -> None:
        """Add the copies of the next piece."""
        self.of_pieces.append(copies)
        if self.payload is not None and self.payload.feedback:
            self.residuals.append(ErrorFeedback(copies.own))

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Set the common model: all workers have the same ``tensors`` now."""
        self.forget()
        for piece in pieces_of(tensors):
            self.add(NeighbourCopies(piece, {}, 0.0))
        self.is_common = True

    def forget(self) -> None:
        """Let go of all copies, as when models have been made equal: the next exchange begins with new ones."""
        self.of_pieces, self.residuals, self.ended_with, self.is_common = [], [], {}, False

    def leave(self, neighbours: Collection[int]) -> None:
        """Let go of the copies of all but these neighbours."""
        for copies in self.of_pieces:
            for gone in copies.neighbours.keys() - {*neighbours}:
                copies.leave(gone)


class _Exchange(PieceByPiece):
    """An exchange of one worker with its neighbours in ``group``."""

    def __init__(self, replicas: Replicas, memory: RingCopies, tensors: Sequence[Tensor], group: Group) -> None:
        super().__init__(tensors)
        self.neighbours = neighbours_of(group, replicas.pipeline)
        self._replicas, self._memory, self._tag = replicas, memory, tag_of(group)
        self._weight = weight_of_each(len(group.members))
        self._known: set[int] | None = None
        """Neighbours that have the same copies; None before that is known."""

    def _compute(self, number: int, piece: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Return this worker's message and those of its neighbours; in full precision its average, and none."""
        memory, payload = self._memory, self._memory.payload
        if payload is None:
            theirs = self._swap(piece, self.neighbours)
            mean = piece.clone()
            average(mean, [theirs[neighbour] for neighbour in self.neighbours], self._weight)
            return mean, {}
        z = self._copies(number, piece).difference(piece)
        residual = memory.residuals[number].residual if payload.feedback else None
        mine = payload.on(piece.dtype).message(z, residual, memory.draws.getrandbits(32))
        return mine, self._swap(mine, self.neighbours)

    def _copies(self, number: int, piece: Tensor) -> NeighbourCopies:
        """Return the copies of a piece, which both ends of them have."""
        memory = self._memory
        if self._known is None:
            self._known = self._compare() if memory.changes else {*memory.ended_with} & {*self.neighbours}
            memory.leave(self._known)
        if memory.changes and number == len(memory.of_pieces):
            memory.add(NeighbourCopies(piece, {}, self._weight))
        if not memory.of_pieces:
            raise WorkerFailedError(BROKEN_OFF)
        copies, new = memory.of_pieces[number], [i for i in self.neighbours if i not in self._known]
        copies.weight = self._weight
        if memory.is_common:
            copies.neighbours = {i: copies.own.clone() for i in new}
        elif new:
            copies.neighbours |= self._swap(copies.own, new)
        return copies

    def _compare(self) -> set[int]:
        """Return the neighbours that name the same last exchange with this worker as it names with them. If there are
        none, or copies have other sizes, let the copies go."""
        memory = self._memory
        if [len(copies.own) for copies in memory.of_pieces] != [len(piece) for _, piece in self._to_come]:
            memory.forget()  # of layers that have been frozen or unfrozen since
        mine = {i: torch.tensor([memory.ended_with.get(i, _NONE)]) for i in self.neighbours}
        theirs = {i: torch.empty_like(number) for i, number in mine.items()}
        transfers.begin(mine, theirs, self._replicas, self._tag).wait()
        known = {i for i, number in mine.items() if int(number) == int(theirs[i]) != _NONE}
        if not known:
            memory.forget()
        return known

    def _put(self, number: int, piece: Tensor, outcome: tuple[Tensor, dict[int, Tensor]]) -> None:
        mine, theirs = outcome
        if self._memory.payload is None:
            piece.copy_(mine)
            return
        copies = self._memory.of_pieces[number]
        copies.commit(self._memory.payload.on(piece.dtype), mine, theirs)
        piece.copy_(copies.own)

    def commit(self) -> None:
        super().commit()
        if not self._to_come and not self._arrived:
            self._memory.ended_with, self._memory.is_common = dict.fromkeys(self.neighbours, self._tag), False

    def abort(self) -> None:
        """Drop the copies, since a neighbour may have changed copies that this worker has not."""
        if self._to_come or self._arrived:
            self._memory.forget()
        super().abort()

    def _swap(self, mine: Tensor, neighbours: Sequence[int]) -> dict[int, Tensor]:
        into = {neighbour: torch.empty_like(mine) for neighbour in neighbours}
        transfers.begin(dict.fromkeys(into, mine), into, self._replicas, self._tag).wait()
        return into


_NONE = -1
"""Number in the place of an exchange where there was none."""


def neighbours_of(group: Group, pipeline: int) -> list[int]:
    """Return the neighbours of ``pipeline`` in ``group``; none if it is alone.

    Raises:
        ConfigurationError: a group of several members has no neighbours.
    """
    members = [worker.pipeline for worker in group.members]
    if len(members) > 1 and not group.neighbours:
        raise ConfigurationError(
            f"group {group.sequence} names no neighbours ({group.reason}), as a ring needs them. Leave out "
            "Decentralized('ring') for a policy that does not."
        )
    return [worker.pipeline for worker in group.neighbours[members.index(pipeline)]] if group.neighbours else []


def weight_of_each(size: int) -> float:
    """Return the weight of a neighbour's model in a ring of ``size`` workers."""
    return 1 / min(size, 3)


def average(x: Tensor, neighbours: Iterable[Tensor], weight: float) -> None:
    """Replace ``x`` by its average with the models of the present ``neighbours``, in full precision."""
    change = torch.zeros_like(x, dtype=residual_dtype(x.dtype))
    for theirs in neighbours:
        change.add_(theirs, alpha=weight).sub_(x, alpha=weight)
    x.add_(change)


class NeighbourCopies:
    """One worker's copies of its own model and of its neighbours' models, for one flat buffer.

    Memory: one buffer for each neighbour, and one more; and one while a message is made. Cut a long buffer into
    several, each with its own copies, to need less of the latter.

    Args:
        own: the initial value of the copy of this worker's model. All start from models exchanged in full precision.
        neighbours: the initial values of the copies of the neighbours' models, by any key.
        weight: :func:`weight_of_each`.
    """

    def __init__(self, own: Tensor, neighbours: Mapping[int, Tensor], weight: float) -> None:
        self.own = own.clone()
        self.neighbours = {key: theirs.clone() for key, theirs in neighbours.items()}
        self.weight = weight

    def difference(self, x: Tensor) -> Tensor:
        """Return z, which this worker sends of its model ``x``, in a new tensor."""
        z = x.to(residual_dtype(x.dtype), copy=True)
        for theirs in self.neighbours.values():
            z.add_(theirs, alpha=self.weight)
        return z.sub_(self.own, alpha=1 + self.weight * len(self.neighbours))

    def commit(self, payload: Payload, mine: Tensor, theirs: Mapping[int, Tensor]) -> None:
        """Add the messages to all copies; afterwards ``own`` is this worker's model.

        Args:
            payload: the payload of all messages.
            mine: this worker's message.
            theirs: the neighbours' messages, by their keys.

        Raises:
            KeyError: the message of a neighbour is missing; nothing has changed.
        """
        messages = [theirs[key] for key in self.neighbours]
        payload.decode(mine, self.own, 1.0)
        for replica, message in zip(self.neighbours.values(), messages, strict=True):
            payload.decode(message, replica, 1.0)

    def leave(self, key: int) -> None:
        """Remove a neighbour: its weight stays with this worker."""
        del self.neighbours[key]
