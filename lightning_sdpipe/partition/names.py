"""Reads and writes of names outside of objects: global variables, variables of closures, and attributes of classes.

A variable is seen by the instructions of Python that read and set it, in the user's own files. An attribute of a class
is replaced by a descriptor that notes when it is read, through the class or through an object.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from types import CellType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

from torch import nn

from lightning_sdpipe.partition.python_values import is_users

_GLOBALS = {"LOAD_GLOBAL": False, "LOAD_NAME": False, "STORE_GLOBAL": True}
_OF_CLOSURES = {"LOAD_DEREF": False, "LOAD_CLASSDEREF": False, "STORE_DEREF": True}
_PLAIN = (type(None), bool, int, float, str, tuple)
_MANY = 10_000  # items of a container that are looked at; a vocabulary or a data set may have millions


class Closures:
    """The user's functions that can be reached from ``root``, with their closures: by attributes, by items of
    containers, as methods of classes, and through what functions hold and name. They outlive a step; a function that a
    step makes does not."""

    def __init__(self, root: Any) -> None:
        self._cells: dict[CodeType, dict[str, list[CellType]]] = {}
        self._names: dict[int, str] = {}  # of each cell, by id: cells compare by their contents
        found: dict[int, Any] = {}
        todo = [root]
        while todo:
            value = todo.pop()
            if id(value) not in found and not isinstance(value, _PLAIN[:-1]):
                found[id(value)] = value
                todo += self._within(value)

    def _within(self, value: Any) -> Iterator[Any]:
        if isinstance(value, FunctionType):
            if is_users(value.__module__):
                yield from self._of_function(value)
        elif isinstance(value, type):
            if is_users(value.__module__):
                yield from (getattr(each, "__func__", getattr(each, "fget", each)) for each in vars(value).values())
                yield from value.__mro__[1:]
        elif isinstance(value, MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, (list, tuple)):
            yield from islice(value, _MANY)
        elif isinstance(value, dict):
            yield from islice(dict.values(value), _MANY)
        elif isinstance(value, nn.Module) or is_users(type(value).__module__):
            yield from getattr(value, "__dict__", {}).values()
            yield type(value)

    def _of_function(self, function: FunctionType) -> Iterator[Any]:
        of_code = self._cells.setdefault(function.__code__, {})
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                of_code.setdefault(name, []).append(cell)
                self._name(cell, f"the variable {name} of {function.__qualname__.rpartition('.<locals>')[0]}")
                yield _content(cell)
        yield from (function.__globals__.get(name) for name in function.__code__.co_names)
        yield function.__defaults__

    def _name(self, cell: CellType, what: str) -> None:
        """Give a variable one name, whichever function uses it; variables of several calls differ in a number."""
        if id(cell) not in self._names:
            same = sum(each.partition(" (call ")[0] == what for each in self._names.values())
            self._names[id(cell)] = f"{what} (call {same + 1})" if same else what

    def named(self, frame: FrameType, name: str) -> Iterator[tuple[str, Any]]:
        """Yield the name of the variable ``name`` of a running function, and its value, where it outlives the step."""
        cells = self._cells.get(frame.f_code, {}).get(name, ())
        for cell in cells:
            value = _content(cell)
            if len(cells) == 1 or value is frame.f_locals.get(name):
                yield self._names[id(cell)], value


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


@contextmanager
def heard_variables(closures: Closures, note: Callable[[str, Any, bool], None]) -> Iterator[None]:
    """Call, around user code in this thread, ``note(name, value, writes)`` for each of the user's global variables, by
    its full name, and of the variables of closures, which the code reads or is about to set. A debugger does not stop
    within."""

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        if not is_users(frame.f_globals.get("__name__")) or not _instructions(frame.f_code):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return instruction

    def instruction(frame: FrameType, event: str, argument: Any) -> Any:
        kind, name = _instructions(frame.f_code).get(frame.f_lasti if event == "opcode" else -1, ("", ""))
        if kind in _OF_CLOSURES:
            for what, value in closures.named(frame, name):
                note(what, value, _OF_CLOSURES[kind])
        elif kind and (_GLOBALS[kind] or name in frame.f_globals):
            note(f"{frame.f_globals['__name__']}.{name}", frame.f_globals.get(name), _GLOBALS[kind])
        return instruction

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)


@lru_cache(maxsize=4096)
def _instructions(code: CodeType) -> dict[int, tuple[str, str]]:
    """Return the name and variable of each instruction that reads or sets a variable that outlives a call, by
    offset."""
    return {
        each.offset: (each.opname, each.argval)
        for each in dis.get_instructions(code)
        if each.opname in _GLOBALS or (each.opname in _OF_CLOSURES and each.argval in code.co_freevars)
    }


class ClassAttributes:
    """The attributes of the user's classes that hold values.

    Args:
        classes: the classes; those that they inherit from are added.
        holds: tells whether a value may change without being set.
        note: called with ``(name, value, writes)`` for each access.
    """

    def __init__(
        self, classes: Iterable[type], holds: Callable[[Any], bool], note: Callable[[str, Any, bool], None]
    ) -> None:
        own = {each: None for cls in classes for each in cls.__mro__ if is_users(each.__module__)}
        self._note = note
        self._seen = {
            (cls, name): _Seen(f"{cls.__name__}.{name}", value, note)
            for cls in own
            for name, value in vars(cls).items()
            if not name.startswith("__") and (isinstance(value, (*_PLAIN, Iterator)) or holds(value))
        }

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Note reads within the context; :meth:`look` finds what is set."""
        for (cls, name), seen in self._seen.items():
            seen.value = vars(cls)[name]
            setattr(cls, name, seen)
        try:
            yield
            self.look()
        finally:
            for (cls, name), seen in self._seen.items():
                if vars(cls).get(name) is seen:
                    setattr(cls, name, seen.value)

    def look(self) -> None:
        """Attribute the changes since the last look to the code that has run since."""
        for (cls, name), seen in self._seen.items():
            if name in vars(cls) and vars(cls)[name] is not seen:
                seen.value = vars(cls)[name]
                setattr(cls, name, seen)
                self._note(seen.what, seen.value, True)


class _Seen:
    """A descriptor in the place of an attribute of a class."""

    def __init__(self, what: str, value: Any, note: Callable[[str, Any, bool], None]) -> None:
        self.what, self.value, self._note = what, value, note

    def __get__(self, owner: Any, kind: type) -> Any:
        self._note(self.what, self.value, False)
        return self.value
