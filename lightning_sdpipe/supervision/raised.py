"""Which exception ended a Python process, read from what it printed.

The process may have failed before it could tell anybody, while it imported the script for instance; the interpreter's
own last words are there in any case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_sdpipe.errors import SchedulerError

_BEGINNING = "Traceback (most recent call last):"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
_EXCEPTION = re.compile(r"^(?P<kind>[A-Za-z_][\w.<>]*)(?:: (?P<message>.*))?$")
_ASIDE = re.compile(r"Exception (ignored|in thread) |Error in atexit\.")  # from there on, the process lives
_CHAIN = re.compile(r"(The above exception was the direct|During handling of the above exception)")
_STYLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # newer interpreters colour what goes to a terminal
_NUMBER = re.compile(r"\d+")
_LONGEST = 300

_OF_OTHERS = (
    *("WorkerFailedError", "RunAborted", "MustEndError", "RunOverError"),
    *("SIGTERMException", "KeyboardInterrupt"),
)


_NO_BUG = SchedulerError.__name__
"""One pipeline or scheduler that is lost may cause it in several others; what is refused is another class."""


@dataclass(frozen=True)
class Raised:
    """An exception that nobody caught."""

    kind: str
    """Its class, with its module where that is not built in."""
    message: str
    """Its first line."""
    place: str
    """The innermost frame, as in ``train.py:41 in training_step``; empty if there is none."""

    @property
    def follows_another(self) -> bool:
        """Whether another process failed first, and this one because of it."""
        return self.kind.rpartition(".")[2] in _OF_OTHERS

    @property
    def may_be_a_bug(self) -> bool:
        """Whether another pipeline that raises the same says that the script is to blame."""
        return not self.follows_another and self.kind.rpartition(".")[2] != _NO_BUG

    def is_like(self, other: Raised) -> bool:
        """The same exception, up to the numbers in its message: a wrong index, a rank, an address."""
        return self._key() == other._key()

    def __str__(self) -> str:
        text = f"{self.kind.rpartition('.')[2]}: {self.message}" if self.message else self.kind.rpartition(".")[2]
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"

    def _key(self) -> tuple[str, str, str]:
        return self.kind, self.place, _NUMBER.sub("#", self.message)


def last_raised(output: str) -> Raised | None:
    """The exception of the last traceback in ``output`` that may have ended the process; None if there is no whole one.

    Others are those of threads, of finalisers and of what is called at the exit.
    """
    lines = [_STYLE.sub("", line).rstrip("\r") for line in output.split("\n")]
    beginnings = _beginnings(lines)
    if not beginnings:
        return None
    place = ""
    for line in lines[beginnings[-1] + 1 :]:
        if frame := _FRAME.match(line):
            function = f" in {frame['function']}" if frame["function"] else ""
            place = f"{frame['file'].rpartition('/')[2]}:{frame['line']}{function}"
        elif line and not line.startswith(" "):
            found = _EXCEPTION.match(line)
            return Raised(found["kind"], found["message"] or "", place) if found else None
    return None


def _beginnings(lines: list[str]) -> list[int]:
    """Where tracebacks begin that may have ended the process."""
    found: list[int] = []
    aside = False
    for number, line in enumerate(lines):
        if line.endswith(_BEGINNING):
            before = next((said for said in reversed(lines[:number]) if said), "")
            if not _CHAIN.match(before):
                aside = _ASIDE.search(before) is not None  # perhaps behind a progress bar
            if not aside:
                found.append(number)
    return found
