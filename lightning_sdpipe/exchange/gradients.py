"""Interface between a pipeline and what averages its gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor


class GradientExchange(Protocol):
    """Replaces the gradients of an update by others, such as their means over replicas.

    Parameters have numbers: their position in the sequence that the pipeline and the exchange were both made with.
    """

    @property
    def early(self) -> Collection[int]:
        """Numbers of the parameters whose gradients are of use before the backward ends."""

    def gradient_ready(self, number: int, gradient: Tensor) -> None:
        """Take the final gradient of parameter ``number``, one of :attr:`early`, while the backward goes on. The
        gradient may change afterwards."""

    def complete(self, gradients: Sequence[Tensor | None]) -> None:
        """End the backward: take all gradients, with those that :meth:`gradient_ready` had. Do not wait."""

    def finish(self) -> list[Tensor | None]:
        """Wait for the gradients that take the place of those given to :meth:`complete`."""
