"""Restoring of what a user's code has changed in this process, wherever it can be reached from an object.

The search follows attributes, the items of containers, what functions and methods hold (closures, defaults, the globals
that they name), and the user's own classes. It does not follow libraries, nor what other threads use. Tensors are left
alone.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import _lru_cache_wrapper, lru_cache, partial
from queue import SimpleQueue
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_sdpipe.partition.python_values import attributes_of

_NOT_FOLLOWED = (
    *(type(None), bool, int, float, complex, str, bytes, Tensor, torch.dtype, torch.device),
    *(ModuleType, BuiltinFunctionType, CodeType, Trainer, Logger),
)
_OF_THREADS = {"threading", "logging", "socket", "multiprocessing", "subprocess", "concurrent", "asyncio", "weakref"}
_MISSING = object()


class Mementos:
    """The state of all that can be reached from ``roots``, for :meth:`restore`.

    ``lost`` names what is found and cannot be restored: iterators that cannot be copied.
    """

    def __init__(self, *roots: Any) -> None:
        self.lost: list[str] = []
        self._undo: list[Callable[[], None]] = []
        found: dict[int, Any] = {}  # kept alive, so that no two have one id
        todo = list(roots)
        while todo:
            value = todo.pop()
            if (
                id(value) not in found
                and not isinstance(value, _NOT_FOLLOWED)
                and _root(type(value)) not in _OF_THREADS
            ):
                found[id(value)] = value
                todo += self._remember(value)

    def restore(self) -> None:
        for undo in self._undo:
            undo()

    def _remember(self, value: Any) -> Iterator[Any]:
        """Remember ``value``, and yield what can be reached from it."""
        again = _state_of(value)
        if again is not None:
            self._undo.append(again)
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            if isinstance(value, (list, set, deque)):
                self._undo.append(partial(_refill, value, self._kept(value)))
            yield from value
        elif isinstance(value, dict):
            self._remember_names(value)
            yield from value.values()
        elif isinstance(value, type):
            if is_users(value.__module__):
                yield from self._remember_class(value)
            return
        elif isinstance(value, MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, _lru_cache_wrapper):
            yield value.__wrapped__
        elif isinstance(value, FunctionType):
            yield from self._remember_function(value)
        attributes = attributes_of(value)
        if isinstance(attributes, MutableMapping):
            self._remember_names(attributes)
            yield from list(attributes.values())
        yield type(value)

    def _remember_names(self, names: MutableMapping[Any, Any], only: Iterable[Any] | None = None) -> None:
        before = {name: names[name] for name in (names if only is None else only) if name in names}
        kept = {name: self._copied(str(name), value) for name, value in before.items()}
        self._undo.append(partial(_reset, names, kept, only is None))

    def _remember_class(self, cls: type) -> Iterator[Any]:
        for name, value in list(vars(cls).items()):
            if name.startswith("__"):
                continue
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if not isinstance(value, (FunctionType, _lru_cache_wrapper)) and not hasattr(value, "__get__"):
                self._undo.append(partial(_set_attribute, cls, name, self._copied(name, value)))
            yield value
        yield from cls.__mro__[1:]

    def _remember_function(self, function: FunctionType) -> Iterator[Any]:
        if not is_users(function.__module__):
            return
        names = set(_names(function.__code__))
        self._remember_names(function.__globals__, names)
        yield from (function.__globals__[name] for name in names if name in function.__globals__)
        for cell in function.__closure__ or ():
            try:
                self._undo.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
            except ValueError:  # it is empty
                continue
            yield cell.cell_contents
        yield (function.__defaults__, function.__kwdefaults__)

    def _kept(self, items: Iterable[Any]) -> list[Any]:
        return [self._copied(type(items).__name__, item) for item in items]

    def _copied(self, name: str, value: Any) -> Any:
        """Return what replaces ``value`` when it is restored: a copy of an iterator, which cannot be turned back."""
        if not isinstance(value, (Iterator, SimpleQueue)):
            return value
        try:
            return copy.deepcopy(value)
        except TypeError:
            self.lost.append(f"{name} ({type(value).__name__})")
            return value


def _state_of(value: Any) -> Callable[[], None] | None:
    """Return a function that restores the internal state of ``value``, or None."""
    if isinstance(value, torch.Generator):
        return partial(_set_state, value, value.get_state())
    if isinstance(value, np.random.Generator):
        return _state_of(value.bit_generator)
    if isinstance(value, np.random.BitGenerator):
        return partial(setattr, value, "state", value.state)
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.ndarray) and value.flags.writeable and not isinstance(value, np.memmap):
        return partial(np.copyto, value, value.copy())
    return None


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _refill(container: Any, before: list[Any]) -> None:
    if len(container) == len(before) and all(x is y for x, y in zip(container, before, strict=True)):
        return
    container.clear()
    container.update(before) if isinstance(container, set) else container.extend(before)


def _reset(names: MutableMapping[Any, Any], before: dict[Any, Any], all_of_them: bool) -> None:
    # outputs of Hugging Face's models refuse changes
    kind: Any = next((kind for kind in (OrderedDict, dict) if isinstance(names, kind)), type(names))
    changed = any(kind.get(names, name, _MISSING) is not value for name, value in before.items())
    if changed or (all_of_them and len(names) != len(before)):
        if all_of_them:
            kind.clear(names)
        for name, value in before.items():
            kind.__setitem__(names, name, value)


def _set_attribute(cls: type, name: str, value: Any) -> None:
    if vars(cls).get(name, _MISSING) is not value:
        setattr(cls, name, value)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


@lru_cache(maxsize=4096)
def is_users(module: str | None) -> bool:
    """Return whether code in ``module`` is the user's own; installed packages are not."""
    root = (module or "builtins").partition(".")[0]
    if root != "__main__" and (root in sys.stdlib_module_names or root == "lightning_sdpipe"):
        return False
    file = getattr(sys.modules.get(str(module)), "__file__", None) or ""
    return "-packages" not in file


def _root(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]
