"""Watches the Python state of a step (numbers, lists, iterators, the user's own objects and random generators): which
code changes it, and which stage would miss a change.

State lies in *places*: attributes of modules, of the user's classes, functions and callbacks, global variables that the
user's functions name, variables of closures, and options of optimizers. Digests of all places before and after each
block tell which code changes which place. Then each stage's part of the step runs once more, with a *mark* in every
place that only other stages change: any use of a mark raises its name, while an assignment replaces it and is fine. A
mark cannot detect ``is``, so a run with the plain values from before the first step is compared with a run with the
true ones.

All runs that change state or set marks are made in child processes, so nothing of them remains.
:mod:`~lightning_sdpipe.partition.provenance` traces tensors.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import date, time, timedelta
from enum import Enum
from functools import _lru_cache_wrapper, partial
from io import IOBase
from itertools import islice
from numbers import Number
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_sdpipe.lightning_internals import OF_EVERY_MODULE, trainer_of
from lightning_sdpipe.lightning_results import is_metric
from lightning_sdpipe.partition.apart import apart
from lightning_sdpipe.partition.effects import EffectRecorder, Original, intercepted, logging_to
from lightning_sdpipe.partition.placeholder import Unusable, refuse_operations
from lightning_sdpipe.partition.provenance import OUTSIDE, note_call
from lightning_sdpipe.partition.python_values import (
    GENERATORS,
    attributes_of,
    attributes_of_object,
    is_of_the_user,
    is_users,
    state_of,
)

_T = TypeVar("_T")
METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
METRIC = "the metric "
_OPTIONS = "the options of the optimizer's group "
_PLAIN = (type(None), bool, int, float, str)
_OTHERS = (bytes, Number, Enum, np.generic, range, frozenset, date, time, timedelta, torch.dtype, torch.device)
"""Further immutable values."""
_MANY = 10_000  # most values of one container that are looked at
_DEPTH = 4  # deepest nesting of containers and objects
_FAILED = ""  # in place of a mark's name: the run failed
_SECONDS = 3600.0  # limit of a run's time


@dataclass(frozen=True)
class Change:
    """A change of the place ``name``, in a block or at a position between blocks
    (:class:`~lightning_sdpipe.partition.provenance.Write`).

    Args:
        replayed: stand-ins of the block repeat the change.
        of_module: the place is an attribute of a module.
        consumed: use changes the value: an iterator or a random generator.
    """

    name: str
    block: int
    position: int
    replayed: bool = False
    of_module: bool = False
    consumed: bool = False


@dataclass(frozen=True)
class _Owner:
    """An owner of places: their present values, by name within ``prefix``, and a function that sets one."""

    prefix: str
    values: Callable[[], Mapping[str, Any]]
    put: Callable[[str, Any], None]
    of_module: bool = False


@dataclass(frozen=True)
class Call:
    """A call of the step with one micro-batch, and the context that it runs in."""

    context: Callable[[], AbstractContextManager[Any]]
    step: Callable[[], Any]


class _MissedError(BaseException):
    """A mark was used; the message is its name. It is not an Exception, so that user code does not catch it."""


class _EndError(BaseException):
    """The stage's blocks have run."""


class Mark(Unusable):
    """Stands for a value that a stage would not have; even comparing or printing it raises."""

    def __init__(self, name: str) -> None:
        super().__init__(lambda: _MissedError(name))


refuse_operations(Mark, "eq", "ne", "hash", "str", "format", "repr", "copy", "deepcopy")


class _Counting:
    """An iterator that counts the items taken from it."""

    def __init__(self, taken_from: Iterator[Any]) -> None:
        self._from, self.taken = taken_from, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.taken += 1
        return next(self._from)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._from, name)


# ------------------------------------------------------------------------- places


def _owners(root: nn.Module) -> list[_Owner]:
    """Return all owners of places that the user's code reaches from ``root``, with each iterator replaced by a counting
    one."""
    found = _reached(root)
    for _, owner, name, value in _places(found):
        if (
            isinstance(value, Iterator)
            and not isinstance(value, (IOBase, _Counting, Mark))
            and not is_of_the_user(value)
        ):
            owner.put(name, _Counting(value))
    return found


def _reached(root: nn.Module) -> list[_Owner]:
    found: list[_Owner] = []
    named: dict[str, tuple[dict[str, Any], set[str]]] = {}  # global variables that functions name, by module
    cells: dict[int, str] = {}
    trainer = trainer_of(root)
    for path, module in root.named_modules():
        if not is_metric(module):
            prefix = f"{path}." if path else ""
            found.append(_Owner(prefix, partial(_attributes, vars(module)), vars(module).__setitem__, of_module=True))
    held = [("callback", each) for each in getattr(trainer, "callbacks", ())]
    held.append(("datamodule", getattr(trainer, "datamodule", None)))
    for kind, each in held:
        if is_of_the_user(each):
            found.append(_owner_of(f"the {kind} {type(each).__name__}.", attributes_of(each) or {}))
    found.append(_Owner(_OPTIONS, partial(_options, trainer), lambda *_: None))
    seen: dict[int, Any] = {}  # kept alive, so that no two have the same id
    todo: list[Any] = [root, *(each for _, each in held)]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (Tensor, *_PLAIN)):
            continue
        seen[id(value)] = value
        if isinstance(value, types.FunctionType) and is_users(value.__module__):
            found.append(_owner_of(f"{value.__module__}.{value.__qualname__}.", vars(value)))
            names = {name for code in _codes(value.__code__) for name in code.co_names} & value.__globals__.keys()
            file = str(value.__globals__.get("__name__"))
            named.setdefault(file, (value.__globals__, set()))[1].update(names)
            todo += (value.__globals__[name] for name in names)
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if name != "__class__" and id(cell) not in cells and (content := _content(cell)) is not None:
                    what = f"the variable {name} of {value.__qualname__.rpartition('.<locals>')[0]}"
                    same = sum(each.partition(" (call ")[0] == what for each in cells.values())
                    seen[id(cell)] = cell
                    cells[id(cell)] = f"{what} (call {same + 1})" if same else what
                    found.append(_owner_of_cell(cells[id(cell)], cell))
                    todo.append(content)
            todo += value.__defaults__ or ()
        elif isinstance(value, type) and is_users(value.__module__):
            own = value.__name__ if issubclass(value, nn.Module) else f"{value.__module__}.{value.__name__}"
            found.append(_Owner(f"{own}.", lambda cls=value: dict(vars(cls)), partial(setattr, value)))  # type: ignore[misc]
            todo += (getattr(each, "__func__", getattr(each, "fget", each)) for each in vars(value).values())
            todo += value.__mro__[1:]
        elif isinstance(value, types.ModuleType) and is_users(value.__name__):
            found.append(_owner_of(f"{value.__name__}.", vars(value)))
        elif isinstance(value, types.MethodType):
            todo += (value.__self__, value.__func__)
        elif isinstance(value, partial):
            todo += (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, (list, tuple, set, deque, dict)):
            inside = dict.values(value) if isinstance(value, dict) else value
            todo += [each for each in islice(inside, _MANY) if type(each) not in _PLAIN]  # a data set has millions
        elif isinstance(value, nn.Module) or is_of_the_user(value):
            todo += (*(attributes_of(value) or {}).values(), type(value))
        elif isinstance(value, _lru_cache_wrapper):
            todo.append(value.__wrapped__)
    for file, (variables, names) in named.items():
        found.append(_Owner(f"{file}.", partial(_of_names, variables, names), variables.__setitem__))
    return found


def _owner_of(prefix: str, names: MutableMapping[str, Any]) -> _Owner:
    return _Owner(prefix, lambda: names, names.__setitem__)


def _owner_of_cell(name: str, cell: types.CellType) -> _Owner:
    return _Owner(name, lambda: {"": _content(cell)}, lambda _, value: setattr(cell, "cell_contents", value))


def _attributes(of_module: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in of_module.items() if name not in OF_EVERY_MODULE}


def _of_names(variables: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: variables[name] for name in names if name in variables}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _options(trainer: Any) -> dict[str, Any]:
    optimizers = getattr(getattr(trainer, "strategy", None), "optimizers", ())
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {str(number): group for number, group in enumerate(groups)}


def _places(owners: Sequence[_Owner]) -> Iterator[tuple[str, _Owner, str, Any]]:
    """Yield each place's full name, its owner, its name there and its value."""
    passed: set[str] = set()
    for owner in owners:
        for name, value in list(owner.values().items()):
            what = f"{owner.prefix}{name}"
            if isinstance(name, str) and not name.startswith("__") and _is_state(value) and what not in passed:
                passed.add(what)
                yield what, owner, name, value


def _is_state(value: Any) -> bool:
    if isinstance(value, (Tensor, nn.Module, types.ModuleType, type, property, classmethod, staticmethod)):
        return False
    return isinstance(value, Mark) or not callable(value) or is_of_the_user(value)


def digest(value: Any) -> Any:
    """Return something that differs when the Python state in ``value`` does; None for objects of unknown kinds. Tensors
    are left out. Of a very large container, only the first values and their number count."""
    return _digest(value, _DEPTH, iter(range(_MANY)))


def _digest(value: Any, depth: int, left: Iterator[int], kept: list[Any] | None = None) -> Any:
    if kept is not None and isinstance(value, (Tensor, nn.Module)):
        return _identity(value, kept)
    if kept is not None and isinstance(value, Iterator) and not is_of_the_user(value):
        return object()  # equal to nothing, since the iterator's position is unknown
    if isinstance(value, (set, frozenset)):
        return len(value), tuple(sorted(repr(item) for item, _ in zip(value, left, strict=False)))
    if isinstance(value, (_PLAIN, _OTHERS)):
        return repr(value)
    if isinstance(value, _Counting):
        return value.taken
    if isinstance(value, np.ndarray) and value.dtype != object:
        return crc32(value.flat[:: 1 + value.size // _MANY].tobytes())
    if isinstance(value, GENERATORS):
        state = state_of(value)
        return crc32(state.numpy().tobytes()) if isinstance(state, Tensor) else repr(state)
    if isinstance(value, (Tensor, nn.Module)) or not depth:
        return None
    within = partial(_digest, depth=depth - 1, left=left, kept=kept)
    if isinstance(value, dict):
        items = ((key, item) for key, item in value.items() if kept is not None or not _in_torch(item))
        found = tuple((str(key), within(item)) for (key, item), _ in zip(items, left, strict=False))
        return found, len(value) > _MANY and len(value)
    if isinstance(value, (list, tuple, deque)):
        values = (item for item in value if kept is not None or not _in_torch(item))
        return tuple(within(item) for item, _ in zip(values, left, strict=False)), len(value) > _MANY and len(value)
    is_own = is_of_the_user(value)
    attributes = attributes_of(value) if is_own else kept is not None and attributes_of_object(value)
    if attributes or is_own:
        return tuple((name, within(item)) for (name, item), _ in zip((attributes or {}).items(), left, strict=False))
    if depth == _DEPTH:
        return None
    return id(value) if kept is None else _identity(value, kept)


def _in_torch(value: Any) -> bool:
    """Return whether ``value`` is a tensor, or None, where one may come."""
    return value is None or isinstance(value, Tensor)


def _identity(value: Any, kept: list[Any]) -> tuple[int, int]:
    """Return the id of ``value`` and, for a tensor, how often it was written to. ``kept`` keeps it alive."""
    kept.append(value)
    return id(value), value._version if isinstance(value, Tensor) and not value.is_inference() else 0


class Untouched:
    """The state of ``root`` before the first :meth:`run`: the Python state that the user's code reaches, and the
    tensors that it keeps there. Buffers of installed packages' modules are left out, since only their values change."""

    def __init__(self, root: nn.Module) -> None:
        self._root, self._kept = root, list[Any]()
        self._state: list[Any] | None = None

    def run(self, work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns.

        Raises:
            TouchedError: the state has changed.
        """
        if self._state is None:
            self._state = self._now()
        try:
            return work()
        finally:
            if self._now() != self._state:
                raise TouchedError

    def _now(self) -> list[Any]:
        owners = [(owner.prefix, owner.values()) for owner in _reached(self._root)]
        owners += [(name, _attributes(vars(each))) for name, each in self._root.named_modules() if is_metric(each)]
        tensors: list[Tensor] = [*self._root.parameters()]
        for module in self._root.modules():
            tensors += module.buffers(recurse=False) if is_users(type(module).__module__) else ()
        found: list[Any] = [_identity(each, self._kept) for each in tensors]
        for prefix, values in owners:
            for name, value in [*values.items()]:
                made = _digest(value, _DEPTH, iter(range(_MANY)), self._kept)
                found.append((prefix, name, _identity(value, self._kept) if made is None else made))
        return found


class TouchedError(BaseException):
    """A run has changed the state. It is not an Exception, so that nothing else handles it."""


# ------------------------------------------------------------------------- observation


class _Run:
    """A run of the step that looks at all places before and after each block.

    Args:
        module: the whole module.
        chain: paths of its blocks.
        once: whether a second call of a block raises :class:`~lightning_sdpipe.partition.provenance.CalledAgain`.
    """

    def __init__(self, module: nn.Module, chain: Sequence[str], once: bool) -> None:
        self._once, self._order = once, list[int]()
        self.changes: list[Change] = []
        self.asked: set[str] = set()
        self._module, self._chain, self._owners = module, chain, _owners(module)
        self._block = self._called = OUTSIDE
        self._position = 0
        self._known: dict[str, tuple[Any, Any]] | None = None  # each value, to keep it alive, and its digest
        self._recorders = [EffectRecorder(path, module.get_submodule(path), self._in_hooks) for path in chain]

    def run(self, call: Call) -> None:
        """Run the step; note what it changes and which metrics it reads."""
        hearing = hearing_of_metrics(lambda name: self.asked.add(f"{METRIC}{name!r}"))
        logging = logging_to(self._module, self._log)
        with call.context(), intercepted(self._module, self._chain, self._call), logging, hearing:
            self._look()
            call.step()
            self._look()

    def _look(self) -> None:
        """Attribute changes since the last look to the code that has run since."""
        known, self._known = self._known, {}
        with _disable_current_modes():
            found = [(what, owner, value, digest(value)) for what, owner, _, value in _places(self._owners)]
        for what, owner, value, made in found:
            self._known[what] = value, made
            before = None if known is None else known.get(what)
            same = before is not None and before[1] == made and (made is not None or before[0] is value)
            if known is None or same:  # without a digest, the same object counts as unchanged
                continue
            replayed = (
                self._block != OUTSIDE
                and what.startswith(f"{self._chain[self._block]}.")
                and (before is None or before[0] is not value or type(value) in (list, dict))
            )
            consumed = isinstance(value, (_Counting, *GENERATORS))
            self.changes.append(Change(what, self._block, self._position, replayed, owner.of_module, consumed))

    def _call(self, index: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        note_call(self._order, index, self._once)
        self._look()
        self._block = self._called = index
        try:
            output, _ = self._recorders[index].call(original, args, kwargs)
            self._look()
        finally:
            self._block = self._called = OUTSIDE
            self._position = max(self._position, index + 1)
        return output

    def _in_hooks(self, entered: bool) -> None:
        self._look()
        self._block = OUTSIDE if entered else self._called

    def _log(self, name: str, *_: Any, **__: Any) -> None:
        self.changes += (Change(metric, self._block, self._position) for metric in metrics_of_log(name))


def metrics_of_log(name: str) -> list[str]:
    """Return the names of the metrics that logging ``name`` makes."""
    return [f"{METRIC}{name + suffix!r}" for suffix in ("", "_step", "_epoch")]


def in_a_child(work: Callable[[], _T]) -> _T:
    """Return what ``work`` returns in a child process."""
    return apart(work, _SECONDS)


def watch(
    module: nn.Module,
    chain: Sequence[str],
    calls: Sequence[Call],
    once: bool,
    run: Callable[[Callable[[], Any]], Any] = in_a_child,
) -> Watched:
    """Watch ``calls`` of a step, one after another, in a function that ``run`` calls.

    Raises:
        CalledAgain: the step calls a block for the second time, which may be called only ``once``.
        Exception: the step raised it.
    """
    plain = {what: value for what, _, _, value in _places(_reached(module)) if isinstance(value, (*_PLAIN, *_OTHERS))}
    changes, asked = run(partial(_observed, module, chain, calls, once))
    initial = {change.name: plain[change.name] for change in changes if change.name in plain}
    return Watched(module, chain, calls, changes, asked, initial)


def _observed(
    module: nn.Module, chain: Sequence[str], calls: Sequence[Call], once: bool
) -> tuple[list[Change], set[str]]:
    changes: list[Change] = []
    asked: set[str] = set()
    for call in calls:
        run = _Run(module, chain, once)
        run.run(call)
        changes += run.changes
        asked |= run.asked
    return changes, asked


# ------------------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Watched:
    """The changes of Python state in the runs of one step.

    Args:
        module: the whole module.
        chain: paths of its blocks.
        calls: calls of the step, with one micro-batch each.
        changes: the changes in all runs.
        asked: the metrics that were read in any run.
        initial: the plain values from before the first run, by the names of their places.
    """

    module: nn.Module
    chain: Sequence[str]
    calls: Sequence[Call]
    changes: Sequence[Change]
    asked: Collection[str]
    initial: Mapping[str, Any]

    def missed(self, span: range) -> Change | None:
        """Return a change, of a value that the stage with the blocks ``span`` reads, that the stage would miss; None if
        there is none."""
        last = span.stop == len(self.chain)
        here, away = dict[str, Change](), dict[str, Change]()
        for change in self.changes:
            inside = change.block != OUTSIDE
            runs = change.block in span if inside else last or change.position < span.stop
            replayed = inside and change.replayed and change.block < span.start
            (here if runs or replayed else away)[change.name] = change
        for name, change in away.items():  # the optimizer's options are always read
            if name.startswith(_OPTIONS) or (change.consumed and name in here):
                return change
        unasked = {name for name in away if name.startswith(METRIC)} - {*self.asked}
        names = [name for name, change in away.items() if not change.consumed and name not in unasked]
        found = (self._read(call, span, names) for call in self.calls) if names else iter(())
        return next((away[name] for name in found if name is not None), None)

    def late(self, end: int) -> set[str]:
        """Return the attributes of modules that user code between blocks changes beyond the end of a stage that ends
        before block ``end``."""
        return {c.name for c in self.changes if c.of_module and c.block == OUTSIDE and c.position >= end}

    def counted(self, end: int) -> set[str]:
        """Return the counters: what user code between blocks changes before block ``end``, and changes again if that
        part of the step runs twice."""
        early = {c.name for c in self.changes if c.block == OUTSIDE and c.position < end}
        names = {name for name in early if not name.startswith(METRIC)}
        return in_a_child(partial(self._changed_twice, names, range(end))) if names else set()

    def _changed_twice(self, names: set[str], span: range) -> set[str]:
        owners, digests = _owners(self.module), []
        for _ in range(2):
            _StageRun(self, span, owners, {}).run(self.calls[0])
            digests.append({what: digest(value) for what, _, _, value in _places(owners)})
        return {name for name in names if digests[0].get(name) != digests[1].get(name)}

    def _read(self, call: Call, span: range, away: Sequence[str]) -> str | None:
        """Return the name of a place in ``away`` that the stage reads; None if it reads none."""
        run = partial(self._run_apart, call, span)
        found, _ = run({name: Mark(name) for name in away})
        if found == _FAILED:  # code in C, for example, refuses a mark with its own error
            found = next((name for name in away if run({name: Mark(name)})[0] is not None), None)
        plain = {name: self.initial[name] for name in away if name in self.initial}
        if found is not None or not plain:
            return found
        true, again = run({}), run({})
        if true != again:  # the step is not deterministic: it may use the time
            return None
        return next((name for name, value in plain.items() if run({name: value}) != true), None)

    def _run_apart(self, call: Call, span: range, values: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        """Run the stage in a child process, with ``values`` in the places that other stages change. Return the name of
        the mark that it used, :data:`_FAILED`, or None, and checksums of what its blocks return."""

        def outcome() -> tuple[str | None, list[int]]:
            stage = _StageRun(self, span, _owners(self.module), values)
            try:
                stage.run(call)
            except _MissedError as missed:
                return str(missed), []
            except Exception:
                return _FAILED, []
            return None, stage.outputs

        return in_a_child(outcome)


class _StageRun:
    """A run of the step up to the end of a stage, with ``values`` in place of what other stages change."""

    def __init__(self, of: Watched, span: range, owners: Sequence[_Owner], values: Mapping[str, Any]) -> None:
        self.outputs: list[int] = []
        self._of, self._span, self._owners = of, span, owners
        self._values = dict(values)  # except for places that the stage has set itself
        self._true: dict[str, tuple[_Owner, str, Any]] = {}

    def run(self, call: Call) -> None:
        """Run the step.

        Raises:
            _MissedError: it used a mark.
        """
        module, chain = self._of.module, self._of.chain
        with call.context(), intercepted(module, chain, self._call), hearing_of_metrics(self._asked):
            self._put()
            try:
                self.outputs.append(_bytes_of(call.step()))
            except _EndError:
                pass
            finally:
                self._take_back()

    def _asked(self, name: object) -> None:
        if (metric := f"{METRIC}{name!r}") in self._values:
            raise _MissedError(metric)

    def _put(self) -> None:
        for what, owner, name, value in list(_places(self._owners)):
            if what in self._values:
                self._true[what] = owner, name, value
                owner.put(name, self._values[what])

    def _take_back(self) -> None:
        """Restore the true values, except where the stage has set its own."""
        for what, (owner, name, value) in self._true.items():
            if what in self._values and owner.values().get(name) is self._values[what]:
                owner.put(name, value)
            else:
                self._values.pop(what, None)
        self._true.clear()

    def _call(self, index: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index >= self._span.stop:
            raise _EndError
        if index < self._span.start:  # another stage runs it, with the true values
            self._take_back()
            output = original(*args, **kwargs)
            self._put()
            return output
        output = original(*args, **kwargs)
        self.outputs.append(_bytes_of(output))
        if index == self._span.stop - 1 and self._span.stop < len(self._of.chain):
            raise _EndError
        return output


class _Metrics(dict[str, Any]):
    def __init__(self, metrics: Any, asked: Callable[[object], None]) -> None:
        super().__init__(metrics)
        self._asked = asked

    def __getitem__(self, name: str) -> Any:
        self._asked(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._asked(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._asked(name)
        return super().get(name, default)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return dict(self)  # for ModelCheckpoint, which deep-copies them


@contextmanager
def hearing_of_metrics(asked: Callable[[object], None]) -> Iterator[None]:
    """Within the context, call ``asked(name)`` whenever code reads a Trainer's metric."""
    originals = {name: vars(Trainer)[name] for name in METRICS}
    for name, original in originals.items():
        heard = partial(lambda original, trainer: _Metrics(original.__get__(trainer), asked), original)
        setattr(Trainer, name, property(heard))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Trainer, name, original)


def _bytes_of(output: Any) -> int:
    """Return a checksum of what a block returns."""
    leaves = tree_leaves(output)
    found = [each.detach().double().sum().item() if isinstance(each, Tensor) else digest(each) for each in leaves]
    return crc32(repr(found).encode())
