"""The mean over a group whose members know the same reference: scatter, reduce, gather, encoded in both phases
(BAGUA §3.4).

Of k members each owns one k-th of the buffer. :func:`scatter` makes a member's messages with the parts of the others;
:func:`reduce` is what an owner makes of those it got: the mean of its part, encoded once for all; :func:`gather` reads
the means. An owner reads its own message too, so that all members end with the same bits.

What is averaged must mean the same to all: gradients, or differences from the last common model. With models that have
nothing in common, errors of 8 bits do not fade as the models come closer (:mod:`.differences` is for those).

An owner's own values are not encoded. So with error feedback the residual of its own part is free for what encoding the
mean leaves out, BAGUA's ε beside the δ of the other parts, and over time

    Σ means + mean over members of δ + ε = Σ over time of the mean of x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightning_sdpipe.exchange.payloads import ErrorFeedback, Payload
from lightning_sdpipe.exchange.payloads.payload import residual_dtype


def parts(n: int, members: int) -> list[slice]:
    """Which of ``n`` elements each member owns: as ``torch.tensor_split`` divides them."""
    size, more = divmod(n, members)
    bounds = [index * size + min(index, more) for index in range(members + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def scatter(
    payload: Payload,
    x: Tensor,
    owner: int,
    members: int,
    feedback: ErrorFeedback | None = None,
    draw: int = 0,
    trains: bool = True,
) -> dict[int, Tensor]:
    """A member's messages to all others, by their places in the group.

    Args:
        payload: of all members.
        x: this member's buffer.
        owner: its place.
        members: how many there are.
        feedback: of ``x``, if the payload has feedback.
        draw: seeds stochastic rounding; another one on each member and in each round.
        trains: False for a member that has run out of data. It sends zeros, and keeps what it has left out.
    """
    messages = {}
    for place, part in enumerate(parts(x.numel(), members)):
        if place == owner:
            continue
        values = x[part] if trains else torch.zeros_like(x[part])
        residual = feedback.residual[part] if feedback is not None and trains else None
        messages[place] = payload.message(values, residual, hash((draw, place)))
    return messages


def reduce(
    payload: Payload,
    x: Tensor,
    owner: int,
    weights: Sequence[float],
    messages: Mapping[int, Tensor],
    feedback: ErrorFeedback | None = None,
    draw: int = 0,
    trains: bool = True,
) -> Tensor:
    """An owner's message with the weighted mean of its part, for all members and itself.

    Args:
        payload: as in :func:`scatter`; so are ``x``, ``owner``, ``feedback``, ``draw`` and ``trains``.
        x: the owner's buffer.
        owner: its place.
        weights: of all members by their places, adding up to 1.
        messages: that the others scattered to this owner.
        feedback: of ``x``.
        draw: seeds stochastic rounding.
        trains: whether ``x`` counts; else it is taken for zeros.
    """
    part = parts(x.numel(), len(weights))[owner]
    mean = torch.zeros_like(x[part], dtype=residual_dtype(x.dtype))
    if trains:
        mean.add_(x[part], alpha=weights[owner])
    for place in sorted(messages):  # not in the order of arrival, so that a run can be repeated
        payload.decode(messages[place], mean, weights[place])
    return payload.message(mean, feedback.residual[part] if feedback is not None else None, hash((draw, owner)))


def gather(payload: Payload, messages: Mapping[int, Tensor], into: Tensor, weight: float | None = None) -> None:
    """Reads the means of all parts, the own one among them, as :meth:`Payload.decode` does it.

    Args:
        payload: as in :func:`scatter`.
        messages: of all owners, by their places.
        into: a buffer for all parts.
        weight: None replaces; a number adds the mean that many times.
    """
    for place, part in enumerate(parts(into.numel(), len(messages))):
        payload.decode(messages[place], into[part], weight)
