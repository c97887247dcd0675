"""Finds tensors of a module that share memory, which must stay shared when parameters move to a device or a flat
bucket.

Two parameters that are different objects over the same memory (``a.weight.data = b.weight.data``) have their own
gradients and optimizer states, and each update shows in both. A tensor in an attribute over the memory of a parameter
(``self.table = weight.data``) shows its updates, too. Any other overlap is refused: views of a part, transposed views,
buffers over parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.lightning_results import is_metric
from lightning_sdpipe.partition.placeholder import Placeholder

_Layout: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class SameMemory:
    """Tensors that share memory. ``parameters`` groups the names of different objects over the same memory;
    ``attributes`` has tensors over the memory of the named parameter."""

    parameters: Sequence[tuple[str, ...]] = ()
    attributes: Sequence[tuple[Tensor, str]] = ()


@dataclass(frozen=True)
class _Extent:
    """The extent of a tensor, in bytes of an address space."""

    what: str
    tensor: Tensor
    is_parameter: bool
    space: str
    start: int
    stop: int

    @property
    def layout(self) -> _Layout:
        return self.space, self.start, self.tensor.dtype, tuple(self.tensor.shape), self.tensor.stride()


def same_memory(module: nn.Module) -> SameMemory:
    """Find the tensors of ``module`` that share memory; parameters may be on ``meta`` or on other stages.

    Raises:
        ConfigurationError: a parameter overlaps another tensor in any other way.
    """
    alike: dict[_Layout, list[_Extent]] = {}
    for extent in _extents(module):
        alike.setdefault(extent.layout, []).append(extent)
    parameters, attributes = [], []
    for extents in alike.values():
        named = [extent for extent in extents if extent.is_parameter]
        for other in extents if named else ():
            if other.is_parameter:
                continue
            if other.what.startswith("buffer") or other.tensor.grad_fn is not None:
                raise _refusal(named[0], other)
            attributes.append((other.tensor, named[0].what))
        if len(named) > 1:
            parameters.append(tuple(extent.what for extent in named))
    _refuse_overlaps([extents[0] for extents in alike.values()])
    return SameMemory(parameters, attributes)


def held_together(module: nn.Module, memory: SameMemory) -> list[list[Tensor]]:
    """Return the tensors of ``memory`` that this worker holds, grouped by memory; parameters come first."""
    together: dict[str, list[Tensor]] = {
        names[0]: [module.get_parameter(name) for name in names] for names in memory.parameters
    }
    first_of = {name: names[0] for names in memory.parameters for name in names}
    for tensor, name in memory.attributes:
        first = first_of.get(name, name)
        together.setdefault(first, [module.get_parameter(first)]).append(tensor)
    return [tensors for tensors in together.values() if not tensors[0].is_meta]


def _extents(module: nn.Module) -> Iterator[_Extent]:
    """Yield the extent of each distinct tensor object; parameters first, by their names."""
    seen: set[int] = set()
    named = [
        *((name, parameter, True) for name, parameter in module.named_parameters()),
        *((f"buffer {name!r}", buffer, False) for name, buffer in module.named_buffers()),
        *(
            (f"a tensor in an attribute of {path or type(module).__name__!r}", tensor, False)
            for path, part in module.named_modules()
            for tensor in tensors_in_attributes([part])
        ),
    ]
    for what, tensor, is_parameter in named:
        if id(tensor) in seen or not tensor.numel():
            continue
        seen.add(id(tensor))
        lies = tensor
        while isinstance(lies, Placeholder):
            lies = lies.meta
        try:
            storage = lies.untyped_storage()
        except (AttributeError, NotImplementedError, RuntimeError):  # a sparse tensor, or a library's own kind
            continue
        size = lies.element_size()
        on_meta = lies.device.type == "meta"  # where all addresses are 0
        space = f"meta {storage._cdata}" if on_meta else str(lies.device)
        start = (0 if on_meta else storage.data_ptr()) + int(lies.storage_offset()) * size
        last = sum((length - 1) * stride for length, stride in zip(lies.shape, lies.stride(), strict=True))
        yield _Extent(what, tensor, is_parameter, space, start, start + (last + 1) * size)


def _refuse_overlaps(extents: Sequence[_Extent]) -> None:
    by_place = sorted(extents, key=lambda extent: (extent.space, extent.start))
    for number, extent in enumerate(by_place):
        for other in by_place[number + 1 :]:
            if other.space != extent.space or other.start >= extent.stop:
                break
            if (extent.is_parameter or other.is_parameter) and _touch(extent, other):
                raise _refusal(*sorted((extent, other), key=lambda e: not e.is_parameter))


def _touch(one: _Extent, other: _Extent) -> bool:
    """Return whether two tensors whose extents overlap share an element. Columns of a matrix, for example, do not."""
    if one.tensor.dtype != other.tensor.dtype:
        return True
    size = one.tensor.element_size()
    first = min(one.start, other.start)
    if (one.start - other.start) % size:
        return True
    marks = torch.zeros((max(one.stop, other.stop) - first) // size, dtype=torch.bool)
    for extent in (one, other):
        view = marks.as_strided(extent.tensor.shape, extent.tensor.stride(), (extent.start - first) // size)
        if view.any():
            return True
        view.fill_(True)
    return False


def _refusal(parameter: _Extent, other: _Extent) -> ConfigurationError:
    what = f"parameter {other.what!r}" if other.is_parameter else other.what
    return ConfigurationError(
        f"Parameter {parameter.what!r} and {what} overlap in memory, and this strategy moves parameters, so that one "
        "would not see the other's changes. Give one of them memory of its own (.clone()); tie whole weights by "
        "assigning the parameter (a.weight = b.weight); and take views and slices in forward()."
    )


CONTAINERS = (list, dict, set, deque)


def tensors_in_attributes(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the tensors in attributes of ``modules`` and in containers there, except parameters and buffers. Metrics
    are left out, since they belong to the last stage."""
    for module in modules:
        if is_metric(module):
            continue
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _tensors(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (*CONTAINERS, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def kept_over_steps(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of ``module`` and the states of its metrics, each with a description."""
    for name, buffer in module.named_buffers():
        yield f"the buffer {name!r}", buffer
    for path, metric in module.named_modules():
        if is_metric(metric):
            for name in metric._defaults:
                for tensor in tree_leaves(getattr(metric, name)):
                    if isinstance(tensor, Tensor):
                        yield f"the metric {path!r}", tensor
