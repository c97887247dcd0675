"""What a worker lets others average with: its model itself, or a copy that it has published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lightning_sdpipe.exchange.buckets import FlatBucket, tensors_of


class SharedModel(Protocol):
    """A model that meetings change. Nothing here may run at the same time as anything else of the same object."""

    def tensors(self, with_step: bool) -> list[Tensor]:
        """What a meeting averages, in place; with what the optimizer has changed since the last boundary, or not yet if
        the worker computes."""

    def take(self) -> None:
        """A boundary is over: the model is what meetings have made of it, and the next step begins."""


class InPlace:
    """The model itself, for meetings of those that stand still."""

    def __init__(self, buckets: Sequence[FlatBucket]) -> None:
        self._buckets = buckets

    def tensors(self, with_step: bool) -> list[Tensor]:
        """See :class:`SharedModel`."""
        assert with_step, "the model may not change while a step is computed on it"
        return tensors_of(self._buckets)

    def take(self) -> None:
        """See :class:`SharedModel`."""


class Published:
    """A copy of the model without the step that is being computed, which is added to it when it is ready. It costs the
    memory of the parameters twice."""

    def __init__(self, buckets: Sequence[FlatBucket]) -> None:
        self._buckets = buckets
        self._published = [bucket.buffer.clone() for bucket in buckets]
        self._computed_on = [tensor.clone() for tensor in self._published]
        self._has_step = False

    def tensors(self, with_step: bool) -> list[Tensor]:
        """See :class:`SharedModel`."""
        if with_step and not self._has_step:
            for new, base, published in zip(tensors_of(self._buckets), self._computed_on, self._published, strict=True):
                published.add_(new - base)
            self._has_step = True
        return self._published

    def take(self) -> None:
        """See :class:`SharedModel`."""
        for new, base, published in zip(
            tensors_of(self._buckets), self._computed_on, self.tensors(with_step=True), strict=True
        ):
            new.copy_(published)
            base.copy_(published)
        self._has_step = False
