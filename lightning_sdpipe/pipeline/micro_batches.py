"""Splitting a mini-batch into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError


@dataclass(frozen=True)
class MicroBatch:
    """A slice of the mini-batch, and its share of the mini-batch's samples."""

    batch: Any
    size: int
    weight: float
    signature: tuple[Any, ...]  # the shapes of its tensors; equal signatures give messages of equal shape


def split(batch: Any, num_micro_batches: int) -> list[MicroBatch]:
    """Splits every tensor whose first dimension is the batch size; everything else goes whole to each micro-batch.

    Sizes differ by at most one sample. The loss of each micro-batch is weighted by its share of the samples, so that
    the gradient of a loss that is a mean over samples equals that of the whole mini-batch.

    Raises:
        ConfigurationError: fewer samples than micro-batches.
    """
    size = batch_size(batch)
    if size < num_micro_batches:
        raise ConfigurationError(
            f"A batch of {size} samples cannot be split into num_micro_batches={num_micro_batches}. Use a larger batch "
            "or fewer micro-batches; if only the last batch of an epoch is that small, set drop_last=True."
        )
    each, more = divmod(size, num_micro_batches)
    parts, start = [], 0
    for index in range(num_micro_batches):
        stop = start + each + (index < more)
        part = _slice(batch, size, start, stop)
        parts.append(MicroBatch(part, stop - start, (stop - start) / size, signature(part)))
        start = stop
    return parts


def whole(batch: Any) -> MicroBatch:
    """The mini-batch as one micro-batch."""
    size = batch_size(batch)
    return MicroBatch(batch, size, 1.0, signature(batch))


def batch_size(batch: Any) -> int:
    """The first dimension of the first tensor that has one, as Lightning counts samples.

    Raises:
        ConfigurationError: there is no such tensor.
    """
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda t: sizes.extend(t.shape[:1]))
    if not sizes:
        raise ConfigurationError(
            f"A batch of type {type(batch).__name__} holds no tensor with a batch dimension, so it cannot be split "
            "into micro-batches. Let the collate function make tensors."
        )
    return sizes[0]


def signature(batch: Any) -> tuple[Any, ...]:
    shapes: list[tuple[Any, ...]] = []
    apply_to_collection(batch, Tensor, lambda t: shapes.append((tuple(t.shape), t.dtype)))
    return tuple(shapes)


def _slice(batch: Any, size: int, start: int, stop: int) -> Any:
    def slice_tensor(tensor: Tensor) -> Tensor:
        return tensor[start:stop] if tensor.ndim and tensor.shape[0] == size else tensor

    return apply_to_collection(batch, Tensor, slice_tensor)
