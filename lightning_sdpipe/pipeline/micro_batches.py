"""Splitting of a mini-batch into micro-batches, by its samples or as the user's module says."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.pipeline.samples import Samples, find_samples, shapes, tensors_in


@dataclass(frozen=True)
class MicroBatch:
    """A part of the mini-batch, and the weight of its loss in that of the mini-batch."""

    batch: Any
    weight: float  # the weights of a mini-batch add up to 1, or to the share of a portion
    place: tuple[int, int] | None = None  # for a portion: which micro-batch of the epoch it is

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """Shapes of its tensors, read before a step may change them; equal signatures give messages of equal shape."""
        return shapes(self.batch)


@dataclass(frozen=True)
class Portion:
    """The part that a pipeline trains of the batch that all pipelines train together.

    Args:
        places: for each of its micro-batches, in order, the position of a batch in the epoch and the number of its
            part.
        sizes: samples of each micro-batch.
        samples: samples of a pipeline on average; the gradient of a pipeline counts in proportion to its samples.
    """

    places: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    samples: float

    @property
    def share(self) -> float:
        """Weight of this pipeline's gradient among those of all; 1 on average."""
        return sum(self.sizes) / self.samples


def split(batch: Any, num_micro_batches: int, module: nn.Module | None = None, multiple: int = 1) -> list[MicroBatch]:
    """Split a mini-batch by its samples, as :mod:`~lightning_sdpipe.pipeline.samples` finds them; parts that belong to
    no sample go whole to each micro-batch. Sizes differ by at most one sample, larger ones first. With fewer samples
    than micro-batches there is one for each sample, or the largest ``multiple`` that a schedule can order.

    A ``module`` may have methods of its own: ``split_batch(batch, n)`` returns n batches instead, and
    ``weigh_batch(batch)`` a number by which their losses count; the number of samples by default. With weights that a
    loss divides by (samples, or labelled words), the gradient is that of the whole mini-batch. Both methods must return
    the same on all stages.

    Raises:
        ConfigurationError: fewer samples than ``multiple``; what a sample is cannot be told; or the module's own
            methods return something else than documented.
    """
    if num_micro_batches == 1:
        return [whole(batch)]
    own = getattr(module, "split_batch", None)
    if own is not None:
        _check_signature(module, own, batch, num_micro_batches)
        parts = list(own(batch, num_micro_batches))
        if len(parts) != num_micro_batches:
            raise ConfigurationError(
                f"{type(module).__name__}.split_batch(batch, {num_micro_batches}) returned {len(parts)} batches; it "
                f"must return {num_micro_batches}."
            )
        weights = _weights(parts, module)
    else:
        samples = find_samples(batch, _ADVICE)
        few = max(samples.count // multiple, 1) * multiple
        sizes = part_sizes(samples.count, min(num_micro_batches, few))
        parts = _cut(samples, sizes)
        weights = _weights(parts, module) if hasattr(module, "weigh_batch") else sizes
    total = sum(weights)
    return [MicroBatch(part, weight / total) for part, weight in zip(parts, weights, strict=True)]


def refuse_time_first(batch: Any, asked: int | None, module: nn.Module | None = None) -> None:
    """Raise ConfigurationError where all tensors of a batch have as many samples as the loader was ``asked`` for in
    their second dimension and not in the first, by which they would be split."""
    tensors = [tensor for _, tensor in tensors_in(batch) if tensor.ndim]
    swapped = [t.ndim > 1 and t.shape[1] == asked and t.shape[0] not in (1, asked) for t in tensors]
    if swapped and all(swapped) and not hasattr(module, "split_batch"):
        raise ConfigurationError(
            f"The loader was asked for {asked} samples, and the tensors of a batch have the shapes "
            f"{[tuple(t.shape) for t in tensors]}: their first dimension, by which a batch is split into "
            f"micro-batches, seems to be another one, such as time. {_ADVICE}"
        )


def part_sizes(samples: int, num_micro_batches: int) -> list[int]:
    """Return the sizes of the micro-batches of a batch: they differ by at most one, larger ones first.

    Raises:
        ConfigurationError: there are fewer samples than micro-batches.
    """
    if samples < num_micro_batches:
        raise ConfigurationError(
            f"A batch of {samples} samples cannot be split into num_micro_batches={num_micro_batches}. Use a larger "
            "batch or fewer micro-batches; if only the last batch of an epoch is that small, set drop_last=True."
        )
    each, more = divmod(samples, num_micro_batches)
    return [each + (index < more) for index in range(num_micro_batches)]


def take_apart(batch: Any, portion: Portion) -> list[MicroBatch]:
    """Return the micro-batches that ``batch`` was put together from.

    Raises:
        ConfigurationError: the batch and the portion have different numbers of samples.
    """
    samples = find_samples(batch, _ADVICE)
    if samples.count != sum(portion.sizes):
        raise ConfigurationError(
            f"The loader was asked for {sum(portion.sizes)} samples and gave {samples.count}. With batch_by_speed=True "
            "a batch must have one sample for each index: let collate_fn and on_after_batch_transfer keep their number."
        )
    return [
        MicroBatch(part, size / portion.samples, place)
        for part, size, place in zip(_cut(samples, portion.sizes), portion.sizes, portion.places, strict=True)
    ]


def _cut(samples: Samples, sizes: Sequence[int]) -> list[Any]:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [samples[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def weight_of(batch: Any, module: nn.Module | None) -> float:
    """Return the weight of a mini-batch's gradient among those of other pipelines: its number of samples, or what the
    module's ``weigh_batch`` says."""
    return float(_weights([batch], module)[0])


def whole(batch: Any) -> MicroBatch:
    """Return the mini-batch as one micro-batch."""
    return MicroBatch(batch, 1.0)


_ADVICE = (
    "Define split_batch(batch, n) in your LightningModule, which returns n batches, or set "
    "SDPipeStrategy(num_micro_batches=1)."
)
_WEIGHT_ADVICE = "Define weigh_batch(batch) in your LightningModule, by which the losses of its batches are weighted."


def _weights(parts: Sequence[Any], module: nn.Module | None) -> Sequence[float]:
    weigh = getattr(module, "weigh_batch", None)
    if weigh is None:
        return [find_samples(part, _WEIGHT_ADVICE).count for part in parts]
    weights = [float(weigh(part)) for part in parts]
    if any(weight < 0 for weight in weights) or sum(weights) == 0:
        raise ConfigurationError(
            f"{type(module).__name__}.weigh_batch returned {weights} for the parts of a batch; weights are 0 or more, "
            "and some of them above."
        )
    return weights


def _check_signature(module: nn.Module | None, method: Any, *arguments: Any) -> None:
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{type(module).__name__}.split_batch does not take (batch, n): {error}. By it a module says "
            "how its batches are split into n micro-batches; rename a method that does something else."
        ) from error
