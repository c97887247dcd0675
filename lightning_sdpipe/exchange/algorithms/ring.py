"""Averaging with the two neighbours of a ring (BAGUA §3.2, D_FP_S and D_LP_S).

In full precision, x ← Σ over itself and its neighbours of ⅓ x; in a ring of two, ½ and ½. The weights are symmetric, so
the mean over the ring stays; if a neighbour has left, its weight stays with self, and that remains so.

In low precision each worker keeps *replicas*, copies x̂ of its own model and of its neighbours', which only messages
change. After its optimizer has made x of x̂, a worker sends

    Q(z),  z = x + Σ over neighbours of w x̂_j − (1 + Σ w) x̂

and all three that keep its x̂ add Q(z) to it; its model then is its x̂ (DCD-PSGD, Tang et al. 2018). With an exact Q
that is the formula above, with the neighbours' models as they were before this step. The paper's printed D_LP_S sends
Q(x) without a reference, whose errors do not fade, and does not converge.

The mean over the ring drifts by the mean of the errors of Q; with a residual for error feedback it does not drift
beyond that residual. Q must be close: 8 or 16 bits. What is left out of z is lost or, with feedback, comes late: on
quadratics, the largest quarter of the values with feedback made models grow without bound, and signs without it stayed
away from the optimum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_sdpipe.exchange.payloads import Payload
from lightning_sdpipe.exchange.payloads.payload import residual_dtype


def weight_of_each(size: int) -> float:
    """Of a neighbour's model in a ring of ``size`` workers."""
    return 1 / min(size, 3)


def average(x: Tensor, neighbours: Iterable[Tensor], weight: float) -> None:
    """Replaces ``x`` by its average with the models of those ``neighbours`` that are there, in full precision."""
    change = torch.zeros_like(x, dtype=residual_dtype(x.dtype))
    for theirs in neighbours:
        change.add_(theirs, alpha=weight).sub_(x, alpha=weight)
    x.add_(change)


class NeighbourCopies:
    """One worker's copies of its own model and of its neighbours', for one flat buffer.

    Memory: the buffer as often as it has neighbours, and once more; and once while a message is made. Cut a long
    buffer into several, each with its replicas, to need less of the latter.

    Args:
        own: what this worker's replica starts from. All start from models that were exchanged in full precision.
        neighbours: the same of the neighbours, by any key.
        weight: :func:`weight_of_each`.
    """

    def __init__(self, own: Tensor, neighbours: Mapping[int, Tensor], weight: float) -> None:
        self.own = own.clone()
        self.neighbours = {key: theirs.clone() for key, theirs in neighbours.items()}
        self._weight = weight

    def difference(self, x: Tensor) -> Tensor:
        """z, which this worker sends of its model ``x``; in a new tensor."""
        z = x.to(residual_dtype(x.dtype), copy=True)
        for theirs in self.neighbours.values():
            z.add_(theirs, alpha=self._weight)
        return z.sub_(self.own, alpha=1 + self._weight * len(self.neighbours))

    def commit(self, payload: Payload, mine: Tensor, theirs: Mapping[int, Tensor]) -> None:
        """Adds what was sent to all replicas; ``own`` is this worker's model then.

        Args:
            payload: of all.
            mine: this worker's message.
            theirs: the neighbours', by their keys.

        Raises:
            KeyError: there is no message of a neighbour; nothing has changed.
        """
        messages = [theirs[key] for key in self.neighbours]
        payload.decode(mine, self.own, 1.0)
        for replica, message in zip(self.neighbours.values(), messages, strict=True):
            payload.decode(message, replica, 1.0)

    def leave(self, key: int) -> None:
        """A neighbour has left: its weight stays with this worker from now on."""
        del self.neighbours[key]
