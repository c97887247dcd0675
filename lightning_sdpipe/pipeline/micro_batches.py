"""Splits a mini-batch into micro-batches, by its samples or as the user's module says.

A batch is opened at its outermost container and at the mappings and dataclasses in it; the values found there are its
parts. A tensor has its samples in the first dimension, a list of strings or numbers has one element for each, and a
packed sequence tells its number. A list of tensors has two readings: one element for each sample (images of several
sizes, a dict of boxes for each), or a container of tensors with the samples in their first dimension. All parts must
agree on the number of samples; a part of length 1 goes with any, as in broadcasting.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import numbers
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_sdpipe.errors import ConfigurationError

_UNKNOWN = -1
_CONSTANTS = (str, bytes, numbers.Number, enum.Enum, np.generic, torch.dtype, torch.device, torch.Size, type(None))


@dataclass(frozen=True)
class MicroBatch:
    """A part of the mini-batch, and the weight of its loss in the mini-batch's loss."""

    batch: Any
    weight: float  # the weights of a mini-batch add up to 1, or to the share of a portion
    place: tuple[int, int] | None = None  # for a portion: its place in the epoch

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """Its shapes, read before a step may change them. Equal signatures give messages of equal shapes."""
        return shapes(self.batch)


@dataclass(frozen=True)
class Portion:
    """A pipeline's part of the batch that all pipelines train together.

    Args:
        places: for each of its micro-batches, in order, the position of a batch in the epoch and the number of its
            part.
        sizes: number of samples of each micro-batch.
        samples: average number of samples of a pipeline; a pipeline's gradient counts in proportion to its samples.
    """

    places: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    samples: float

    @property
    def share(self) -> float:
        """Weight of this pipeline's gradient; the average over pipelines is 1."""
        return sum(self.sizes) / self.samples


def split(batch: Any, num_micro_batches: int, module: nn.Module | None = None, multiple: int = 1) -> list[MicroBatch]:
    """Split a mini-batch by its samples, as :func:`find_samples` finds them; parts that belong to no sample go whole to
    each micro-batch. Sizes differ by at most one sample, larger ones first. If there are fewer samples than
    micro-batches, the number of micro-batches falls to the largest multiple of ``multiple`` that the samples allow,
    since the schedule can order only multiples.

    A ``module`` may define two methods: ``split_batch(batch, n)`` returns n batches instead, and ``weigh_batch(batch)``
    the weight of a batch's loss, by default its number of samples. If a loss is divided by its weight (samples, or
    labelled words), the gradient is that of the whole mini-batch. Both methods must return the same on all stages.

    Raises:
        ConfigurationError: there are fewer samples than ``multiple``, the samples cannot be found, or the module's own
            methods return something else.
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
    """Raise ConfigurationError if all tensors of a batch have the number of samples that the loader was ``asked`` for
    in their second dimension, rather than in the first, along which they would be split."""
    tensors = [tensor for _, tensor in tensors_in(batch) if tensor.ndim]
    swapped = [t.ndim > 1 and t.shape[1] == asked and t.shape[0] not in (1, asked) for t in tensors]
    if swapped and all(swapped) and not hasattr(module, "split_batch"):
        raise ConfigurationError(
            f"The loader was asked for {asked} samples, and the tensors of a batch have the shapes "
            f"{[tuple(t.shape) for t in tensors]}: their first dimension, by which a batch is split into "
            f"micro-batches, seems to be another one, such as time. {_ADVICE}"
        )


def part_sizes(samples: int, num_micro_batches: int) -> list[int]:
    """Return the sizes of a batch's micro-batches: they differ by at most one, larger ones first.

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
    """Return the micro-batches that make up ``batch``.

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
    """Return the weight of a mini-batch's gradient among pipelines: its number of samples, or the result of the
    module's ``weigh_batch``."""
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


# -------------------------------------------------------------------- samples


@dataclass(frozen=True)
class Samples:
    """The ``count`` samples of ``batch``."""

    batch: Any
    count: int
    is_list: bool  # whether the batch is an uncollated list of samples
    is_plain: bool = False  # whether all its parts are tensors with the samples in their first dimension

    def __getitem__(self, samples: slice) -> Any:
        """Return a batch of some of the samples, which may be changed in place: its tensors share memory with the whole
        batch only, and tensors that go with any sample are copied."""
        batch: Any = self.batch
        if self.is_list:
            return batch[samples]
        if self.is_plain:
            if type(batch) is Tensor:
                return batch[samples].data  # as in _sliced
            if type(batch) is dict:
                return {key: part[samples].data for key, part in batch.items()}
            return type(batch)([part[samples].data for part in batch])
        return _rebuilt(self.batch, lambda part: _sliced(part, self.count, samples), opens_lists=True)


def find_samples(batch: Any, advice: str) -> Samples:
    """Find the samples of ``batch``.

    Args:
        batch: a batch of a loader.
        advice: what to do if the samples cannot be found, for the message.

    Raises:
        ConfigurationError: the parts of the batch do not agree on a number, or one is of an unknown kind.
    """
    plain = _plain_parts(batch)
    if plain:
        return Samples(batch, plain[0].shape[0], is_list=False, is_plain=True)
    parts = [(name, part) for name, part in _parts(batch, "batch", opens_lists=True) if not _is_constant(part)]
    count = _agreed([part for _, part in parts])
    if count is not None:
        return Samples(batch, count, is_list=False)
    if _is_list_of_samples(batch):
        return Samples(batch, len(batch), is_list=True)
    found = ", ".join(f"{name}: {_described(part)}" for name, part in parts) or "nothing but constants"
    raise ConfigurationError(
        f"A batch cannot be split into micro-batches, since its parts do not tell how many samples it has: {found}. "
        f"Tensors should have the samples in their first dimension, and lists one element for each. {advice}"
    )


def _plain_parts(batch: Any) -> Sequence[Tensor]:
    """Return the parts of a tensor, or of a list, tuple or dict of tensors, if their first dimensions are equal, as in
    most batches; then no other reading is needed. Else return nothing."""
    kind = type(batch)
    parts: Sequence[Any] = batch if kind in (tuple, list) else ()
    if kind is Tensor:
        parts = [batch]
    elif kind is dict:
        parts = [*batch.values()]
    for part in parts:
        if type(part) is not Tensor or part.layout is not torch.strided or part.is_nested or part.requires_grad:
            return ()
        if not part.ndim or part.shape[0] != parts[0].shape[0]:
            return ()
    return parts


def shapes(batch: Any) -> tuple[Any, ...]:
    """Return the shapes of everything in ``batch``; for objects of unknown kinds, only their type."""
    if plain := _plain_parts(batch):
        return tuple([(tuple(part.shape), str(part.dtype)) for part in plain])
    if isinstance(batch, PackedSequence):
        return "packed", *shapes(batch.data), tuple(batch.batch_sizes.tolist())
    if _is_constant(batch):
        return ()
    if _is_array(batch):
        return tuple(batch.shape), str(batch.dtype)
    if _is_list_of_constants(batch):
        return (len(batch),)
    children = [child for _, child in _children(batch, opens_lists=True)]
    return tuple(map(shapes, children)) if children else (type(batch).__qualname__,)


def tensors_in(batch: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors and arrays in ``batch`` with their names, except those in objects of unknown kinds."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, np.ndarray) and batch.dtype.kind in "biufc":
        yield name, torch.from_numpy(batch)
    elif isinstance(batch, PackedSequence):
        yield from ((f"{name}.data", batch.data), (f"{name}.batch_sizes", batch.batch_sizes))
    else:
        for key, child in _children(batch, opens_lists=True):
            yield from tensors_in(child, f"{name}{key}")


def _agreed(parts: Sequence[Any]) -> int | None:
    """Return the number of samples on which the readings of all parts agree, or None."""
    with_readings = [(part, _readings(part)) for part in parts]
    votes = [vote for vote in with_readings if vote[1] != {1}] or with_readings
    common = set.intersection(*(counts for _, counts in votes)) if votes else set()
    if len(common) > 1:  # all are lists with two readings; lists of dicts or of lists have one element for each sample
        elements = [element for part, _ in votes for element in part]
        per_sample = any(isinstance(element, Mapping) or _is_list_of_constants(element) for element in elements)
        return len(votes[0][0]) if per_sample else min(_inside(votes[0][0]))
    if any(counts == common or _inside(part) == common for part, counts in votes):
        return min(common, default=None)
    return None  # lists of equal length that hold tensors of other lengths: probably batches of several loaders


def _readings(part: Any) -> set[int]:
    """Return the numbers of samples that ``part`` may have; empty if its kind is unknown."""
    if _is_array(part):
        return {part.shape[0]}
    if isinstance(part, PackedSequence):
        return {int(part.batch_sizes[0])}
    if _is_list_of_constants(part):
        return {len(part)}
    if isinstance(part, list | tuple):
        inside = _inside(part)
        return (inside if len(inside) == 1 else set()) - {_UNKNOWN} | ({len(part)} if _are_alike(part) else set())
    return set()


def _inside(container: Any) -> set[int]:
    """Return the numbers of samples that the parts within ``container`` may have; 1 only if there is no other."""
    found: set[int] = set()
    for _, child in _children(container, opens_lists=True):
        if _is_container(child):
            found |= _inside(child)
        elif not _is_constant(child):
            found |= _readings(child) or {_UNKNOWN}
    return found - {1} or found


def _is_list_of_samples(batch: Any) -> bool:
    """Return whether ``batch`` is an uncollated list of samples: containers that are no batches themselves."""
    if not isinstance(batch, list | tuple) or not all(map(_is_container, batch)):
        return False
    return _are_alike(batch) and any(len(_inside(element)) > 1 for element in batch)


def _are_alike(elements: list[Any] | tuple[Any, ...]) -> bool:
    def kind(element: Any) -> Any:
        if _is_array(element):
            return element.ndim, element.dtype
        return type(element), frozenset(element) if isinstance(element, Mapping) else None

    return len(set(map(kind, elements))) == 1


def _sliced(part: Any, count: int, samples: slice) -> Any:
    if isinstance(part, Tensor) and not part.requires_grad and (_is_array(part) or part.ndim == 0):
        # .data: views share a version counter, so a step that changes its part in place would break the others' graphs
        return part[samples].data if part.ndim and part.shape[0] == count else part.clone()
    if _is_constant(part):
        return part
    if _is_array(part):
        return part[samples] if part.shape[0] == count else part
    if isinstance(part, PackedSequence) and int(part.batch_sizes[0]) == count:
        return pack_sequence(unpack_sequence(part)[samples], enforce_sorted=part.sorted_indices is None)
    if _is_list_of_constants(part):
        return part[samples] if len(part) == count else part
    if isinstance(part, list | tuple):
        if _inside(part) == {count}:
            return _rebuilt(part, lambda child: _sliced(child, count, samples), opens_lists=True)
        return part[samples] if len(part) == count else part
    return part


def _parts(value: Any, name: str, opens_lists: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple) and not _is_named(value) and not opens_lists:
        yield name, value
    elif _is_container(value):
        for key, child in _children(value, opens_lists):
            yield from _parts(child, f"{name}{key}", opens_lists=False)
    else:
        yield name, value


def _children(value: Any, opens_lists: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif _is_named(value):
        yield from ((f".{field}", getattr(value, field)) for field in value._fields)
    elif isinstance(value, list | tuple) and opens_lists:
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif _is_dataclass(value):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))


def _rebuilt(value: Any, change: Callable[[Any], Any], opens_lists: bool) -> Any:
    """Return ``value`` with each of the parts that :func:`_parts` yields changed."""
    if not _is_container(value) or (isinstance(value, list | tuple) and not _is_named(value) and not opens_lists):
        return change(value)
    changed = [_rebuilt(child, change, opens_lists=False) for _, child in _children(value, opens_lists)]
    if isinstance(value, Mapping):
        items = OrderedDict(zip(value, changed, strict=True))
        return defaultdict(value.default_factory, items) if isinstance(value, defaultdict) else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return type(value)(*changed) if _is_named(value) else type(value)(changed)
    other = copy.copy(value)
    for field, child in zip(dataclasses.fields(value), changed, strict=True):
        object.__setattr__(other, field.name, child)
    return other


def _described(part: Any) -> str:
    if _is_array(part):
        return str(tuple(part.shape))
    if isinstance(part, PackedSequence):
        return f"packed, {int(part.batch_sizes[0])}"
    if isinstance(part, list | tuple):
        kinds = " and ".join(sorted({type(element).__name__ for element in part}))
        return f"{type(part).__name__} of {len(part)} {kinds}"
    return type(part).__name__


def _is_constant(value: Any) -> bool:
    return value.ndim == 0 if isinstance(value, Tensor | np.ndarray) else isinstance(value, _CONSTANTS)


def _is_array(value: Any) -> bool:
    """Return whether ``value`` can be sliced. Sparse and nested tensors cannot."""
    if isinstance(value, Tensor):
        return value.layout == torch.strided and not value.is_nested
    return isinstance(value, np.ndarray)


def _is_list_of_constants(value: Any) -> bool:
    return isinstance(value, list | tuple) and not _is_named(value) and all(map(_is_constant, value))


def _is_container(value: Any) -> bool:
    if isinstance(value, PackedSequence) or _is_list_of_constants(value):
        return False
    return isinstance(value, Mapping | list | tuple) or _is_dataclass(value)


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
