"""Codec of the messages of a group's members: one protocol, whatever the members know in common; and which part of a
piece each of them owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from lightning_sdpipe.exchange.payloads.payload import num_blocks
from lightning_sdpipe.policies.decisions import Group

REFUSAL = 255
"""Byte of a message that asks to exchange a part in full precision. A message of these bytes alone is a NaN in the
values or in the header of every payload, and a part with a NaN is exchanged in full precision anyway."""


@dataclass(frozen=True)
class Members:
    """The members of a group: pipelines in increasing order, and the weight of each model."""

    members: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, group: Group) -> Members:
        """Return the members of a group that the policy decided on."""
        return cls(tuple(worker.pipeline for worker in group.members), group.weights)

    def weight(self, pipeline: int) -> float:
        return self.weights[self.members.index(pipeline)]

    def without(self, pipeline: int) -> list[int]:
        """Return the other members, from the next one on, so that members begin with different ones."""
        place = self.members.index(pipeline)
        return [*self.members[place + 1 :], *self.members[:place]]


@dataclass(frozen=True)
class Offset:
    """The offset of a flat tensor: the piece in which it lies, and the number of values before it there. It identifies
    what is kept for the tensor from one exchange to the next."""

    piece: int
    start: int

    def part(self, span: slice) -> Offset:
        return Offset(self.piece, self.start + span.start)


def parts(n: int, members: int) -> list[slice]:
    """Return the part of ``n`` elements that each member owns, divided as by ``torch.tensor_split``."""
    size, more = divmod(n, members)
    bounds = [index * size + min(index, more) for index in range(members + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def owned(n: int, members: Sequence[int], block: int) -> dict[int, slice]:
    """Return the part of ``n`` values that each member owns: whole blocks, divided as evenly as possible."""
    blocks = parts(num_blocks(n, block), len(members))
    return {
        member: slice(min(n, span.start * block), min(n, span.stop * block))
        for member, span in zip(members, blocks, strict=True)
    }


class Codec(Protocol):
    """An encoding of one worker's values in messages to others.

    ``x`` is always from :meth:`prepared`, and ``at`` is its offset. An *outcome* is the input from which :meth:`apply`
    makes the new values; float32, or float64 for float64.
    """

    block: int
    """Parts begin at multiples of this number."""

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """Return the bytes of a message with ``n`` values."""

    def meets(self, team: Members) -> None:
        """Note that these members are about to exchange."""

    def prepared(self, piece: Tensor, number: int) -> Tensor:
        """Return the values to average; they are not changed."""

    def encode_part(self, x: Tensor, at: Offset) -> Tensor:
        """Return a message with this worker's values of a part that another one owns."""

    def reduce_part(
        self, x: Tensor, at: Offset, weight: float, others: Sequence[tuple[Tensor, float]], members: int
    ) -> tuple[Tensor, Tensor] | None:
        """Return the mean of a part that this worker owns.

        Args:
            x: this worker's values.
            at: their offset.
            weight: their weight.
            others: messages of the others with their weights.
            members: number of the group's members.

        Returns:
            A message with the mean for the others, and the outcome for this worker; None if the messages cannot be
            used, and the part has to be exchanged in full precision.
        """

    def decode_mean(self, x: Tensor, at: Offset, mine: Tensor, mean: Tensor) -> Tensor:
        """Return the outcome for a part that another worker owns, given this worker's message and the message with the
        mean."""

    def exact(self, x: Tensor, mean: Tensor) -> Tensor:
        """Return the outcome if the mean is known in full precision."""

    def share(self, x: Tensor, outcome: Tensor) -> Tensor:
        """Return what workers of the same host, whose mean is ``x``, are told of the outcome."""

    def apply_shared(self, x: Tensor, published: Tensor) -> Tensor:
        """Return the outcome for a worker of the same host that has the values ``x``."""

    def apply(self, piece: Tensor, number: int, outcome: Tensor) -> None:
        """Change the model, and what is remembered, by the outcome."""

    def aborted(self) -> None:
        """Forget what the messages of an aborted exchange may have left inconsistent."""


def refusal(nbytes: int, device: torch.device) -> Tensor:
    """Return a message that asks for full precision."""
    return torch.full((nbytes,), REFUSAL, dtype=torch.uint8, device=device)


def is_refusal(message: Tensor) -> bool:
    return len(message) > 0 and bool((message[:8] == REFUSAL).all())
