"""What user code reads and sets by name outside of objects: global variables, and attributes of classes.

A global variable is seen by the instructions of Python that read and set it, in the user's own files. An attribute of a
class is replaced by a descriptor that notes when it is read, through the class or through an object.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from lightning_sdpipe.partition.mementos import is_users

_GLOBALS = {"LOAD_GLOBAL": False, "LOAD_NAME": False, "STORE_GLOBAL": True}
_PLAIN = (type(None), bool, int, float, str, tuple)


@contextmanager
def heard_globals(note: Callable[[str, Any, bool], None]) -> Iterator[None]:
    """Around user code in this thread: ``note(name, value, writes)`` for each of the user's global variables that it
    reads, or is about to set, by its whole name. A debugger does not stop within."""

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        if not is_users(frame.f_globals.get("__name__")) or not _instructions(frame.f_code):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return instruction

    def instruction(frame: FrameType, event: str, argument: Any) -> Any:
        name, writes = _instructions(frame.f_code).get(frame.f_lasti if event == "opcode" else -1, ("", False))
        if name and (writes or name in frame.f_globals):
            note(f"{frame.f_globals['__name__']}.{name}", frame.f_globals.get(name), writes)
        return instruction

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)


@lru_cache(maxsize=4096)
def _instructions(code: CodeType) -> dict[int, tuple[str, bool]]:
    """Those that read or set a global variable: its name, and whether it is set, by their place."""
    found = (each for each in dis.get_instructions(code) if each.opname in _GLOBALS)
    return {each.offset: (each.argval, _GLOBALS[each.opname]) for each in found}


class ClassAttributes:
    """Those of the user's classes that hold values.

    Args:
        classes: and those that they inherit from.
        holds: may a value change without being set?
        note: told ``(name, value, writes)`` of what is read.
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
        """Within, reading is noted, and :meth:`look` finds what is set."""
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
        """What has been set since was set by the code that has run since."""
        for (cls, name), seen in self._seen.items():
            if name in vars(cls) and vars(cls)[name] is not seen:
                seen.value = vars(cls)[name]
                setattr(cls, name, seen)
                self._note(seen.what, seen.value, True)


class _Seen:
    """In the place of an attribute of a class."""

    def __init__(self, what: str, value: Any, note: Callable[[str, Any, bool], None]) -> None:
        self.what, self.value, self._note = what, value, note

    def __get__(self, owner: Any, kind: type) -> Any:
        self._note(self.what, self.value, False)
        return self.value
