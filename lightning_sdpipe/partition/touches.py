"""Reads and writes of Python's state in a step: numbers, lists, iterators, the user's own objects and random
generators.

They lie in attributes of modules and of their classes and in global variables; the metrics that the step has logged
count as well. Tensors leave traces in torch (:mod:`~lightning_sdpipe.partition.provenance`). An attribute or a global
variable is seen when it is read or set; a change within an object is seen between two looks at it. Reading an iterator
changes it.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import IOBase
from typing import Any
from zlib import crc32

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_sdpipe.lightning_internals import OF_EVERY_MODULE, trainer_of
from lightning_sdpipe.lightning_results import is_metric
from lightning_sdpipe.partition.effects import hear_assignments, listening
from lightning_sdpipe.partition.names import ClassAttributes, Closures, heard_variables
from lightning_sdpipe.partition.python_values import GENERATORS, attributes_of, is_of_the_user, is_users, state_of

_CODE = (nn.Module, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
METRIC = "the metric "
_HELD = ("callbacks", "datamodule")
_MANY = 10_000  # values that are looked at in one
_DEPTH = 4  # of containers and objects in each other


@dataclass(frozen=True)
class Touch:
    """A read of ``what``, or a write if ``writes``, in a block or at a position of the code outside
    (:class:`~lightning_sdpipe.partition.provenance.Write`).

    Args:
        anew: the write does not depend on the value before.
        replayed: stand-ins of the block repeat it.
        attribute: ``what`` is an attribute of a module, or lies in one.
    """

    what: str
    writes: bool
    block: int
    position: int
    anew: bool = False
    replayed: bool = False
    attribute: bool = False


class Touches:
    """Observer of one module while its steps are rehearsed.

    Args:
        module: the whole module.
        chain: paths of its blocks.
    """

    def __init__(self, module: nn.Module, chain: Sequence[str]) -> None:
        self._module = module
        self._modules = {name: m for name, m in module.named_modules() if not is_metric(m)}
        self._paths = {id(m): name for name, m in self._modules.items()}  # a metric's hash depends on its values
        self._blocks = [f"{path}." for path in chain]
        self._classes = ClassAttributes({type(m) for m in self._modules.values()}, _holds, self._named)
        self._found: list[Touch] = []
        self._place: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._states: dict[str, tuple[Any, bool, Any]] = {}  # the object, whether a stand-in changes it, its state
        self._looking = False

    @contextmanager
    def heard(self, into: list[Touch], place: Callable[[], tuple[int, int]]) -> Iterator[None]:
        """Add the accesses within the context to ``into``; ``place()`` is the block and the position."""
        self._found, self._place = into, place
        with _without_modes():
            self._states = {what: (v, plain, _state(v)) for what, v, plain in self._candidates()}
        stop = hear_assignments()
        try:
            with (
                listening(self._set),
                self._reading(),
                self._metrics(),
                self._classes.heard(),
                heard_variables(Closures(self._module), self._variable),
            ):
                for what in self._options_of_optimizers():
                    self._note(what, writes=False)  # every update does
                yield
                self.look()
        finally:
            stop()

    def look(self) -> None:
        """Attribute the changes since the last look to the code that has run since."""
        self._looking = True
        try:
            self._classes.look()
            with _without_modes():
                states = {what: _state(value) for what, (value, _, _) in self._states.items()}
            for what, (value, plain, before) in self._states.items():
                now = states[what]
                if now != before:
                    self._states[what] = value, plain, now
                    if isinstance(value, GENERATORS):
                        self._note(what, writes=False)
                    self._note(
                        what,
                        writes=True,
                        replayed=plain and self._in_its_block(what),
                        attribute=self._is_attribute(what),
                    )
        finally:
            self._looking = False

    def logged(self, name: str) -> None:
        """Note that the step has logged a value."""
        for suffix in ("", "_step", "_epoch"):
            self._note(f"{METRIC}{name + suffix!r}", writes=True)

    def _candidates(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield what may change without being set: its name, the object, and whether stand-ins see changes in it."""
        for what, options in self._options_of_optimizers().items():
            yield what, options, False
        known: set[int] = set()
        for path, module in self._modules.items():
            for name, value in vars(module).items():
                if name not in OF_EVERY_MODULE and id(value) not in known and _holds(value):
                    known.add(id(value))
                    yield f"{path}.{name}".lstrip("."), value, type(value) in (list, dict)
        for file in {type(module).__module__ for module in self._modules.values()}:
            for name, value in vars(sys.modules.get(file, object)).items():
                if isinstance(value, GENERATORS) and id(value) not in known and file.partition(".")[0] != "torch":
                    known.add(id(value))
                    yield f"{file}.{name}", value, False

    def _options_of_optimizers(self) -> dict[str, dict[str, Any]]:
        strategy = getattr(trainer_of(self._module), "strategy", None)
        groups = [group for optimizer in getattr(strategy, "optimizers", ()) for group in optimizer.param_groups]
        return {f"the options of the optimizer's group {number}": group for number, group in enumerate(groups)}

    def _set(self, module: nn.Module, name: str) -> None:
        path = self._paths.get(id(module))
        value = vars(module).get(name)
        if path is None or name in OF_EVERY_MODULE or name.startswith("__") or isinstance(value, (Tensor, nn.Module)):
            return
        what = f"{path}.{name}".lstrip(".")
        self._states.pop(what, None)
        if _holds(value):
            self._states[what] = value, type(value) in (list, dict), _state(value)
        if isinstance(value, (list, tuple, dict)) and value and all(map(_in_torch, _items(value))):
            return
        self._note(what, writes=True, anew=True, replayed=self._in_its_block(what), attribute=True)

    def _named(self, what: str, value: Any, writes: bool) -> None:
        """Note that an attribute of a class or a global variable is read or set."""
        if self._looking and not writes:
            return
        if _holds(value) and (writes or what not in self._states):
            self._states[what] = value, False, _state(value)
        self._note(what, writes, anew=writes)
        if not writes and _is_taken_from(value):
            self._note(what, writes=True)

    def _variable(self, what: str, value: Any, writes: bool) -> None:
        if isinstance(value, types.FunctionType):
            value = vars(value)  # its attributes
        if writes or _has_names(value) or not isinstance(value, (*_CODE, Tensor, types.ModuleType, *GENERATORS)):
            self._named(what, value, writes)

    def _is_attribute(self, what: str) -> bool:
        path, _, name = what.rpartition(".")
        return name in vars(self._modules.get(path, object))

    def _in_its_block(self, what: str) -> bool:
        block, _ = self._place()
        return block >= 0 and what.startswith(self._blocks[block])

    def _note(self, what: str, writes: bool, **more: bool) -> None:
        self._found.append(Touch(what, writes, *self._place(), **more))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        def read(module: nn.Module, name: str) -> Any:
            value = object.__getattribute__(module, name)
            if self._looking:
                return value
            if name == "__dict__" and is_users(sys._getframe(1).f_globals.get("__name__")):
                return _Attributes(module)
            if not name.startswith("__") and name not in OF_EVERY_MODULE:
                path = self._paths.get(id(module))
                if path is not None and not isinstance(value, (*_CODE, Tensor, *GENERATORS)):
                    what = f"{path}.{name}".lstrip(".")
                    self._note(what, writes=False)
                    if _is_taken_from(value):
                        self._note(what, writes=True, attribute=True)
            return value

        nn.Module.__getattribute__ = read  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__

    def _metrics_of(self, original: Any, trainer: Trainer) -> _Metrics:
        return _Metrics(original.__get__(trainer), self._note)

    def _held_by_trainer(self, name: str, trainer: Trainer) -> Any:
        held = vars(trainer).get(name)
        for each in (held if isinstance(held, list) else [held]) if not self._looking else ():
            if is_of_the_user(each):
                self._named(f"the {name.removesuffix('s')} {type(each).__name__}", each, False)
        return held

    @contextmanager
    def _metrics(self) -> Iterator[None]:
        """Note metrics of the Trainer that a step asks for as reads; a step that asks for callbacks reads all of
        them, and one that asks for the data module reads all of it."""
        originals = {name: vars(Trainer)[name] for name in METRICS}
        for name, original in originals.items():
            setattr(Trainer, name, property(partial(self._metrics_of, original)))
        for name in _HELD:
            setattr(Trainer, name, property(partial(self._held_by_trainer, name)))
        try:
            yield
        finally:
            for name in _HELD:
                delattr(Trainer, name)
            for name, original in originals.items():
                setattr(Trainer, name, original)


class _Attributes(MutableMapping[str, Any]):
    """The attributes of a module, for user code that uses its ``__dict__``."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def _all(self) -> dict[str, Any]:
        attributes: dict[str, Any] = object.__getattribute__(self._module, "__dict__")
        return attributes

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name) if name in self._all() else self._all()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._all().pop(name, None)
        if isinstance(value, (Tensor, nn.Module)):
            self._all()[name] = value  # which the module would register
        else:
            setattr(self._module, name, value)

    def __delitem__(self, name: str) -> None:
        del self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


class _Metrics(dict[str, Any]):
    def __init__(self, metrics: Any, note: Callable[..., None]) -> None:
        super().__init__(metrics)
        self._note = note

    def _read(self, name: Any) -> None:
        self._note(f"{METRIC}{name!r}", writes=False)

    def __getitem__(self, name: str) -> Any:
        self._read(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._read(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read(name)
        return super().get(name, default)


def _holds(value: Any) -> bool:
    """Return whether ``value`` may change without being set."""
    kept = isinstance(value, (list, dict, set, deque, np.ndarray, *GENERATORS))
    return kept or is_of_the_user(value) or _has_names(value)


def _has_names(value: Any) -> bool:
    """Return whether ``value`` is a module of the user's, or one of the user's classes other than a torch module."""
    if isinstance(value, types.ModuleType):
        return is_users(value.__name__)
    return isinstance(value, type) and not issubclass(value, nn.Module) and is_users(value.__module__)


def _is_taken_from(value: Any) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, IOBase)


@contextmanager
def _without_modes() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _state(value: Any) -> Any:
    return _state_within(value, _DEPTH, iter(range(_MANY)))


def _state_within(value: Any, depth: int, left: Iterator[int]) -> Any:
    """Return something that differs when the Python state in ``value`` does. Tensors are seen elsewhere; of an object
    that holds very many values the first ones and their number count."""
    if isinstance(value, (type(None), bool, int, float, str)):
        return repr(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return crc32(value.flat[:: 1 + value.size // _MANY].tobytes())
    if isinstance(value, GENERATORS):
        state = state_of(value)
        return crc32(state.numpy().tobytes()) if isinstance(state, Tensor) else repr(state)
    if isinstance(value, (Tensor, nn.Module)) or not depth:
        return None
    within = partial(_state_within, depth=depth - 1, left=left)
    if _has_names(value):
        return within({name: each for name, each in vars(value).items() if not name.startswith("__")})
    if isinstance(value, dict):
        items = ((key, item) for key, item in value.items() if not _in_torch(item))
        return tuple((str(key), within(item)) for (key, item), _ in zip(items, left, strict=False))
    if isinstance(value, (list, tuple, deque)):
        values = (item for item in value if not _in_torch(item))
        return tuple(within(item) for item, _ in zip(values, left, strict=False)), len(value) > _MANY and len(value)
    if isinstance(value, set):
        return len(value), tuple(sorted(repr(item) for item, _ in zip(value, left, strict=False)))
    if is_of_the_user(value):
        return tuple(
            (name, within(item)) for (name, item), _ in zip((attributes_of(value) or {}).items(), left, strict=False)
        )
    return id(value) if depth < _DEPTH else None


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def _in_torch(value: Any) -> bool:
    """Return whether ``value`` is a tensor, or the place of one."""
    return value is None or isinstance(value, Tensor)


def missed(traces: Sequence[Sequence[Touch]], runs: Callable[[Touch], bool], start: int) -> Iterator[Touch]:
    """Yield the changes that a stage does not see, of values that it reads.

    Args:
        traces: the touches of successive steps.
        runs: tells whether the stage runs the code of a touch.
        start: the stage's first block. Stand-ins take the place of the blocks before it.
    """
    changed: dict[str, Touch] = {}
    for touch in (touch for trace in traces for touch in trace):
        here = runs(touch) or (touch.replayed and touch.block < start)
        if touch.writes and not here:
            changed[touch.what] = touch
        elif touch.writes and touch.anew:
            changed.pop(touch.what, None)
        elif not touch.writes and here and touch.what in changed:
            yield changed[touch.what]


def late(touches: Sequence[Touch], end: int) -> set[str]:
    """Return the attributes that are changed outside of blocks and beyond the end of a stage that ends before block
    ``end``."""
    changes = (t for t in touches if t.attribute and t.writes and t.block < 0 and t.position >= end)
    return {touch.what for touch in changes}


def logged_late(touches: Sequence[Touch], end: int) -> set[str]:
    """Return the metrics that are logged beyond the end of a stage that ends before block ``end``."""
    logged = (t for t in touches if t.writes and t.what.startswith(METRIC))
    return {t.what for t in logged if (t.position if t.block < 0 else t.block) >= end}


def counted(touches: Sequence[Touch]) -> set[str]:
    """Return what a step changes outside of blocks depending on its value before, as a counter."""
    read, begun, found = set[str](), set[str](), set[str]()
    for touch in touches:
        if touch.block >= 0:
            continue
        if not touch.writes and touch.what not in begun:
            read.add(touch.what)
        elif touch.writes:
            begun.add(touch.what)
            if touch.what in read:
                found.add(touch.what)
    return found
