"""Finding the samples of a batch, whatever a collate function has made of them.

A batch is opened at its outermost container and at the mappings and dataclasses in it; the values found there are its
parts. A tensor has its samples in the first dimension, a list of strings or numbers has one element for each, a packed
sequence says so itself. A list that holds tensors has two readings: one element for each sample (images of several
sizes, a dict of boxes for each), or a container of tensors that have the samples in their first dimension. All parts
must agree on the number of samples; a part of length 1 goes with any, as in broadcasting.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import numbers
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_sdpipe.errors import ConfigurationError

_UNKNOWN = -1
_CONSTANTS = (str, bytes, numbers.Number, enum.Enum, np.generic, torch.dtype, torch.device, torch.Size, type(None))


@dataclasses.dataclass(frozen=True)
class Samples:
    """The samples of ``batch``, ``count`` of them."""

    batch: Any
    count: int
    is_list: bool  # whether the batch is a list of samples, as they came from the dataset

    def __getitem__(self, samples: slice) -> Any:
        """Return a batch of some of the samples. Tensors share memory, and parts that go with any sample are copied:
        each batch may be changed in place."""
        if self.is_list:
            return self.batch[samples]
        return _rebuilt(self.batch, lambda part: _sliced(part, self.count, samples), opens_lists=True)


def find_samples(batch: Any, advice: str) -> Samples:
    """Find the samples of ``batch``.

    Args:
        batch: a batch of a loader.
        advice: what to do if the samples cannot be found, for the message.

    Raises:
        ConfigurationError: the parts of the batch do not agree, or one of them is of an unknown kind.
    """
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


def shapes(batch: Any) -> tuple[Any, ...]:
    """Return the shapes of everything in ``batch``; of objects of unknown kinds only their type."""
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
    """Return the number of samples that is a reading of every part, or None."""
    with_readings = [(part, _readings(part)) for part in parts]
    votes = [vote for vote in with_readings if vote[1] != {1}] or with_readings
    common = set.intersection(*(counts for _, counts in votes)) if votes else set()
    if len(common) > 1:  # all are lists with two readings; a list of dicts or of lists has one element for each sample
        elements = [element for part, _ in votes for element in part]
        per_sample = any(isinstance(element, Mapping) or _is_list_of_constants(element) for element in elements)
        return len(votes[0][0]) if per_sample else min(_inside(votes[0][0]))
    if any(counts == common or _inside(part) == common for part, counts in votes):
        return min(common, default=None)
    return None  # lists of equal length that hold tensors of different ones: batches of several loaders, it seems


def _readings(part: Any) -> set[int]:
    """Return the numbers of samples that ``part`` may have; none if its kind is not known."""
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
    """Return the lengths of the parts within ``container``; 1 only if there is no other."""
    found: set[int] = set()
    for _, child in _children(container, opens_lists=True):
        if _is_container(child):
            found |= _inside(child)
        elif not _is_constant(child):
            found |= _readings(child) or {_UNKNOWN}
    return found - {1} or found


def _is_list_of_samples(batch: Any) -> bool:
    """Return whether ``batch`` is an uncollated list from the dataset: containers that are not batches themselves."""
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
        # .data: views have one version counter, so a step that changes its part in place would spoil the others' graphs
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
    """Return ``value`` with its parts changed, opened as by :func:`_parts`."""
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
