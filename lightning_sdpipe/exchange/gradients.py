"""What a pipeline tells of its gradients to those that average them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class GradientExchange(Protocol):
    """Replaces the gradients of an update by other ones, such as their means over replicas.

    Parameters are known by number: their place in the sequence that the pipeline and the exchange were both made with.
    """

    def gradient_ready(self, number: int, gradient: Tensor) -> None:
        """The gradient of parameter ``number`` is final; the backward goes on. It may change when this has returned."""

    def complete(self, gradients: Sequence[Tensor | None]) -> None:
        """The backward is over: these are all gradients, with those that :meth:`gradient_ready` had. Does not wait."""

    def finish(self) -> list[Tensor | None]:
        """Waits for the gradients that take the place of those given to :meth:`complete`."""
