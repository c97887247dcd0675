"""Averages with the two neighbours in a ring (BAGUA §3.2, D_FP_S and D_LP_S).

In full precision, x ← Σ over itself and its neighbours of ⅓ x; in a ring of two, ½ and ½. The weights are symmetric, so
the mean over the ring stays; if a neighbour has left, its weight stays with self, so the mean still stays.

In low precision each worker keeps *replicas*, copies x̂ of its own model and of its neighbours' models, which only
messages change. After its optimizer has made x of x̂, a worker sends

    Q(z),  z = x + Σ over neighbours of w x̂_j − (1 + Σ w) x̂

and all three that keep its x̂ add Q(z) to it; its model then is its x̂ (DCD-PSGD, Tang et al. 2018). With an exact Q
that is the formula above, with the neighbours' models as they were before this step. The paper's printed D_LP_S sends
Q(x) without a reference, whose errors do not fade, and does not converge.

The mean over the ring drifts by the mean of the errors of Q; with a residual for error feedback it does not drift
beyond that residual. Q must be close: 8 or 16 bits. The part of z that is left out is lost or, with feedback, comes
late: on quadratics, the largest quarter of the values with feedback made models grow without bound, and signs without
it stayed away from the optimum.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.common_reference import BROKEN_OFF
from lightning_sdpipe.exchange.moving import Pending, pieces_of, tag_of
from lightning_sdpipe.exchange.payloads import ErrorFeedback, Payload
from lightning_sdpipe.exchange.payloads.payload import residual_dtype
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas


class RingMean:
    """Gives each member of a group its average with its neighbours, as ``Group.neighbours`` names them.

    Memory, unless in full precision: three models, and a residual if the payload has feedback.

    Args:
        replicas: replicas of which this worker is one.
        payload: ``Half`` or ``EightBit``; None for full precision.
    """

    def __init__(self, replicas: Replicas, payload: Payload | None) -> None:
        self.replicas = replicas
        self.payload = payload
        self.weight = weight_of_each(len(replicas.ranks))
        self.copies: list[NeighbourCopies] = []
        self.residuals: list[ErrorFeedback] = []
        self.draws = random.Random(replicas.pipeline)

    def begin(self, tensors: Sequence[Tensor], neighbours: Sequence[int]) -> None:
        """Set the common model and the neighbours: all workers have the same ``tensors`` now."""
        if self.payload is None:
            return
        self.copies = [NeighbourCopies(p, dict.fromkeys(neighbours, p), self.weight) for p in pieces_of(tensors)]
        self.residuals = [ErrorFeedback(p) for p in pieces_of(tensors)] if self.payload.feedback else []

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """See :class:`~lightning_sdpipe.exchange.moving.Mover`.

        Raises:
            ConfigurationError: a group of several members has no neighbours.
        """
        return _Ring(self, tensors, neighbours_of(group, self.replicas.pipeline), tag_of(group))


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
            average(self._beside, [theirs[neighbour] for neighbour in self._neighbours], self._mover.weight)
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
        """Drop the replicas until :meth:`RingMean.begin`, since a neighbour may have changed replicas that this worker
        has not."""
        if self._to_come:
            self._mover.copies, self._mover.residuals = [], []
        self._to_come.clear()

    def _swap(self, mine: Tensor, like: Tensor) -> dict[int, Tensor]:
        into = {neighbour: torch.empty_like(like) for neighbour in self._neighbours}
        transfers.begin(dict.fromkeys(into, mine), into, self._mover.replicas, self._tag).wait()
        return into


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
    """Replace ``x`` by its average with the models of the ``neighbours`` that are there, in full precision."""
    change = torch.zeros_like(x, dtype=residual_dtype(x.dtype))
    for theirs in neighbours:
        change.add_(theirs, alpha=weight).sub_(x, alpha=weight)
    x.add_(change)


class NeighbourCopies:
    """One worker's copies of its own model and of its neighbours' models, for one flat buffer.

    Memory: the buffer as often as it has neighbours, and once more; and once while a message is made. Cut a long
    buffer into several, each with its replicas, to need less of the latter.

    Args:
        own: the initial value of this worker's replica. All start from models that were exchanged in full precision.
        neighbours: the initial values of the neighbours' replicas, by any key.
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
        """Add the messages to all replicas; afterwards ``own`` is this worker's model.

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
        """Remove a neighbour that has left: its weight stays with this worker from now on."""
        del self.neighbours[key]
