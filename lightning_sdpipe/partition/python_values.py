"""Packs Python values for JSON, and unpacks them: values other than activations that stages send each other."""

from __future__ import annotations

import base64
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_sdpipe.partition.placeholder import Placeholder

Packed = Any  # what JSON can hold
LARGEST = 2**20  # most bytes of all tensors and arrays in one value

_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "deque": deque}
_CONTAINERS = (dict, *_SEQUENCES.values())
_LIBRARIES = ("site-packages", "dist-packages")
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class NotPackedError(Exception):
    """A value cannot travel: its kind is unknown, or it is too large."""


def pack(value: Any) -> Packed:
    """Return ``value`` in a form that JSON can hold.

    Raises:
        NotPackedError: the value is too large, or is no plain Python value, tensor, array, random generator, or
            container of these.
    """
    return _pack(value, [LARGEST])


def _pack(value: Any, left: list[int]) -> Packed:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor) and has_values(value):
        dtype = str(value.dtype).removeprefix("torch.")
        _take(value.numel() * value.element_size(), left)
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return {"tensor": _text(data), "dtype": dtype, "shape": list(value.shape)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        _take(value.nbytes, left)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {kind: _text(np.ascontiguousarray(value).tobytes()), "dtype": str(value.dtype), "shape": value.shape}
    if isinstance(value, Enum):
        return {"member": value.name}
    if isinstance(value, GENERATORS):
        return {"generator": _pack(state_of(value), left)}
    if isinstance(value, dict):
        return {"dict": [[_pack(key, left), _pack(item, left)] for key, item in value.items()]}
    kind = next((name for name, sequence in _SEQUENCES.items() if type(value) is sequence), "")
    if kind:
        items = sorted(value, key=repr) if kind == "set" else value
        return {kind: [_pack(item, left) for item in items]}
    raise NotPackedError(type(value).__name__)


def has_values(tensor: Tensor) -> bool:
    """Return whether this process has the values of ``tensor``, in dense form."""
    return not isinstance(tensor, Placeholder) and tensor.layout is torch.strided and not tensor.is_meta


def unpack(packed: Packed, now: Any, device: torch.device) -> Any:
    """Return the packed value. If ``now``, the present value in its place, is a matching container, tensor, array or
    generator, it is changed in place, so that all references see the change. New tensors are put on ``device``.

    Raises:
        NotPackedError: an enumeration's member or a generator is packed, and ``now`` is not one.
    """
    if not isinstance(packed, dict):
        return packed
    kind, data = next(iter(packed.items()))
    if kind == "tensor":
        return _tensor(packed, now, device)
    if kind in ("array", "scalar"):
        array = np.frombuffer(base64.b64decode(data), dtype=packed["dtype"]).reshape(packed["shape"])
        if isinstance(now, np.ndarray) and (now.dtype, now.shape) == (array.dtype, array.shape) and now.flags.writeable:
            now[...] = array
            return now
        return array.copy() if kind == "array" else array[()]
    if kind == "member" and isinstance(now, Enum):
        return type(now)[data]
    if kind == "generator" and isinstance(now, GENERATORS):
        _set_state(now, unpack(data, None, torch.device("cpu")))
        return now
    if kind in ("member", "generator"):
        what = "a member of an enumeration" if kind == "member" else "a generator of random numbers"
        raise NotPackedError(f"{what}, in the place of a {type(now).__name__}")
    if kind == "dict":
        pairs = [(unpack(key, None, device), item) for key, item in data]
        was = now if isinstance(now, dict) else {}
        items = {key: unpack(item, was.get(key), device) for key, item in pairs}
        return _refilled(now, dict, items)
    before = list(now) if isinstance(now, (list, tuple, deque)) else []
    before += [None] * len(data)
    values = [unpack(item, before[place], device) for place, item in enumerate(data)]
    return _refilled(now, _SEQUENCES[kind], values)


def _refilled(now: Any, kind: type, content: Any) -> Any:
    if kind is tuple or not isinstance(now, kind):
        return kind(content)
    held: Any = now
    held.clear()
    held.extend(content) if isinstance(held, (list, deque)) else held.update(content)
    return held


def _tensor(packed: dict[str, Any], now: Any, device: torch.device) -> Tensor:
    dtype, shape = getattr(torch, packed["dtype"]), packed["shape"]
    data = bytearray(base64.b64decode(packed["tensor"]))
    value = (
        torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
    )
    if isinstance(now, Tensor) and not now.is_meta and now.dtype == dtype and list(now.shape) == shape:
        with torch.no_grad():
            now.copy_(value)
        return now
    return value.to(device)


def _take(size: int, left: list[int]) -> None:
    left[0] -= size
    if left[0] < 0:
        raise NotPackedError(f"more than {LARGEST} bytes")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def is_of_the_user(value: Any) -> bool:
    """Return whether ``value`` is an object with attributes and of a class of the user's own."""
    if isinstance(value, types.SimpleNamespace):
        return True
    kind = type(value)
    if isinstance(value, (Tensor, nn.Module, type, *_CONTAINERS)) or attributes_of(value) is None:
        return False
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names or isinstance(value, Enum):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return not any(part in file for part in _LIBRARIES)


@lru_cache(maxsize=4096)
def is_users(module: str | None) -> bool:
    """Return whether code in ``module`` is the user's own; installed packages are not."""
    root = (module or "builtins").partition(".")[0]
    if root != "__main__" and (root in sys.stdlib_module_names or root == "lightning_sdpipe"):
        return False
    file = getattr(sys.modules.get(str(module)), "__file__", None) or ""
    return "-packages" not in file


class _WithSlots(MutableMapping[str, Any]):
    """The attributes of an object whose class has ``__slots__``; changes reach it even if it is frozen."""

    def __init__(self, owner: Any, slots: Sequence[str]) -> None:
        self._owner, self._slots = owner, slots
        self._others: dict[str, Any] = getattr(owner, "__dict__", {})

    def __getitem__(self, name: str) -> Any:
        if name not in self._slots:
            return self._others[name]
        try:
            return object.__getattribute__(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._slots:
            object.__setattr__(self._owner, name, value)
        else:
            self._others[name] = value

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        unset = object()
        yield from (name for name in self._slots if self.get(name, unset) is not unset)
        yield from self._others

    def __len__(self) -> int:
        return sum(1 for _ in self)


@lru_cache(maxsize=1024)
def _slots_of(kind: type) -> Sequence[str]:
    """Return the names of a class's slots, private ones in Python's mangled form."""
    members = (vars(base).items() for base in kind.__mro__ if "__slots__" in vars(base))
    return [name for each in members for name, m in each if isinstance(m, types.MemberDescriptorType)]


def attributes_of(value: Any) -> MutableMapping[str, Any] | None:
    """Return the attributes of ``value`` as a mapping that can change them; None if it cannot have any."""
    kind: type = type(value)
    slots = _slots_of(kind)
    return _WithSlots(value, slots) if slots else getattr(value, "__dict__", None)


def attributes_of_object(value: Any) -> MutableMapping[str, Any] | None:
    """Return the attributes of an object of the user's or of a data library, such as a cache or a graph; None for
    objects of torch and Python, and for modules, classes and functions."""
    kind = type(value)
    if isinstance(value, (Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, Enum)):
        return None
    if kind.__module__.partition(".")[0] in _NO_DATA and kind is not types.SimpleNamespace:
        return None
    return attributes_of(value)


def tensors_within(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """Yield the tensors in a batch, also those in attributes of objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and (attributes := attributes_of_object(leaf)) is not None:
            yield from tensors_within(dict(attributes), depth - 1)


_NO_DATA = sys.stdlib_module_names - {"__main__"} | {"torch", "numpy", "lightning", "lightning_sdpipe", "torchmetrics"}


def state_of(generator: Any) -> Any:
    """Return the state of a random generator."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
