"""Averaging models that have no common reference, in pairs and in groups that change: differences between what was sent
instead of what was sent itself.

x̂ is what everybody reads from the message with x. A member adds *mean of the x̂ − its own x̂* to its model, where in full
precision it would put the mean in its place. So it keeps what its message left out, nothing is lost over time, and the
mean over the members is that of their models before, whatever the errors:

    pair:   x_i += ½ (x̂_j − x̂_i)
    group:  x_j += Q(u) − x̂_j,  u = mean of the x̂ and the owner's own x;   the owner: Q(u) + k (u − Q(u))

where the owner of a part, of k members, takes over what encoding the mean has left out. In 8 bits, messages are modulo
(:class:`~lightning_sdpipe.exchange.payloads.Modulo`), whose errors shrink with the distance of models; with ``Half``
they are as large as the last bits of 16. (BAGUA's formula (§3.2), the sum of the x̂ itself, does not converge.)

The same form makes a mean harmless that arrives late: a model that has moved on adds the mean minus what it has sent,
and the mean over the workers still is what it would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_sdpipe.exchange.payloads import Modulo, Payload
from lightning_sdpipe.exchange.payloads.payload import residual_dtype


def difference(payload: Modulo | Payload, x: Tensor, mine: Tensor, theirs: Tensor, into: Tensor) -> Tensor:
    """What ``theirs`` holds minus what ``mine`` holds: of a pair, one worker's has the other's bits with the sign
    reversed.

    Args:
        payload: of both.
        x: what this worker has encoded into ``mine``.
        mine: its message.
        theirs: the other's, or that of an owner with the mean.
        into: as long as ``x``; float32, or float64 for float64.

    Returns:
        Blocks where the two were too far apart for θ, so that ``into`` is wrong there: exchange in full precision.
        A single False if nothing can be wrong.
    """
    wrong = _read(payload, theirs, x, into)
    _read(payload, mine, x, into, -1.0)
    return wrong


def mean_of_part(
    payload: Modulo | Payload, x: Tensor, owner: int, weights: Sequence[float], messages: Mapping[int, Tensor]
) -> tuple[Tensor, Tensor]:
    """u, the weighted mean of an owner's part, and blocks where a member was too far away for θ.

    Args:
        payload: of all members.
        x: the owner's part of its model.
        owner: its place in the group.
        weights: of all members by their places, adding up to 1.
        messages: that the others have made of their parts, by their places.
    """
    mean = x.to(residual_dtype(x.dtype)) * weights[owner]
    wrong = [_read(payload, messages[place], x, mean, weights[place]) for place in sorted(messages)]
    return mean, torch.stack(wrong).any(0)


def owner_takes(payload: Modulo | Payload, mean: Tensor, message: Tensor, members: float) -> Tensor:
    """What an owner's part becomes: Q(u) + k (u − Q(u)), where ``message`` holds Q(u) for the other members. With
    weights w that are not equal, 1 / w of the owner stands for k: then the weighted sum over the members stays."""
    sent = torch.empty_like(mean)
    _read(payload, message, mean, sent)
    return sent.lerp_(mean, members)


def add_late(x: Tensor, mean: Tensor, sent: Tensor) -> None:
    """Lets ``x``, which has moved on since ``sent`` was sent, take over the ``mean`` that came of it: x += mean − sent.

    Overwrites ``mean``.
    """
    x.add_(mean.sub_(sent))


def _read(
    payload: Modulo | Payload, message: Tensor, reference: Tensor, into: Tensor, weight: float | None = None
) -> Tensor:
    if isinstance(payload, Modulo):
        return payload.decode(message, reference, into, weight)
    payload.decode(message, into, weight)
    return torch.zeros(1, dtype=torch.bool, device=into.device)
