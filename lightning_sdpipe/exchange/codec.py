"""What the members of a group write to each other, and what they make of it: one protocol, whatever is known to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_sdpipe.exchange.members import Members, Offset

REFUSAL = 255
"""A message of these bytes alone asks to exchange a part in full precision. They are a NaN in the values or in the
header of every payload, and what holds a NaN is exchanged in full precision anyway."""


class Codec(Protocol):
    """How the values of one worker are written for others.

    ``x`` are always values as :meth:`prepared`, and ``at`` is where they lie. An *outcome* is what :meth:`apply`
    makes the new values of; float32, or float64 for float64.
    """

    block: int
    """Parts begin at multiples of it."""

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """Of a message with ``n`` values."""

    def meets(self, team: Members) -> None:
        """These are about to exchange."""

    def prepared(self, piece: Tensor, number: int) -> Tensor:
        """The values that are to be averaged; they are not changed."""

    def encode_part(self, x: Tensor, at: Offset) -> Tensor:
        """A message with this worker's values of a part that another one owns."""

    def reduce_part(
        self, x: Tensor, at: Offset, weight: float, others: Sequence[tuple[Tensor, float]], members: int
    ) -> tuple[Tensor, Tensor] | None:
        """The mean of a part of one's own.

        Args:
            x: this worker's values.
            at: their place.
            weight: of them.
            others: messages, and the weight of each.
            members: of the group.

        Returns:
            A message with the mean for the others, and the outcome for this worker; None if the messages cannot be
            used, and the part has to be exchanged in full precision.
        """

    def decode_mean(self, x: Tensor, at: Offset, mine: Tensor, mean: Tensor) -> Tensor:
        """The outcome for a part that another worker owns, of this worker's message and of that with the mean."""

    def exact(self, x: Tensor, mean: Tensor) -> Tensor:
        """The outcome, if the mean is known in full precision."""

    def share(self, x: Tensor, outcome: Tensor) -> Tensor:
        """What workers of the same host, whose mean ``x`` is, need to know of the outcome."""

    def apply_shared(self, x: Tensor, published: Tensor) -> Tensor:
        """The outcome for one of them, with values ``x`` of its own."""

    def apply(self, piece: Tensor, number: int, outcome: Tensor) -> None:
        """Changes the model, and what is remembered, by the outcome."""

    def aborted(self) -> None:
        """An exchange was broken off: forgets what its messages may have left inconsistent."""


def refusal(nbytes: int, device: torch.device) -> Tensor:
    """A message that asks for full precision."""
    return torch.full((nbytes,), REFUSAL, dtype=torch.uint8, device=device)


def is_refusal(message: Tensor) -> bool:
    return len(message) > 0 and bool((message[:8] == REFUSAL).all())
