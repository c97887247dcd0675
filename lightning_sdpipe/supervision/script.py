"""Runs a script as ``python SCRIPT`` or ``python -m MODULE`` would, and reports to the supervisor the exception that
ends it.

The output of a process shows the exception only sometimes: torch writes ``[rank0]:`` before each line, Hydra prints a
traceback of its own, and a pattern finds what was merely printed. So the exception is written to a descriptor that the
supervisor reads, when it leaves the script: the process may take long to end after that.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from types import TracebackType

from lightning_sdpipe.errors import LOST_CONNECTION, SchedulerError, place_of

_NUMBER = re.compile(r"\d+")
_LONGEST = 300

_OF_OTHERS = (
    *("WorkerFailedError", "RunAborted", "MustEndError", "RunOverError"),
    *("SIGTERMException", "KeyboardInterrupt"),
)
_NO_BUG = SchedulerError.__name__
"""Exception that one lost pipeline or scheduler may cause in several others; a refusal is of another class."""

REPORT = "SDPIPE_REPORT"
"""Environment variable with the descriptor; the script does not see it."""


@dataclass(frozen=True)
class UncaughtException:
    """An exception that was not caught."""

    kind: str
    """Class of the exception, with its module where it is not built in."""
    message: str
    """First line of its message."""
    place: str
    """Innermost frame, as in ``train.py:41 in training_step``; empty if there is none."""

    @property
    def follows_another(self) -> bool:
        """True if another process failed first, and this one because of it."""
        return self.kind.rpartition(".")[2] in _OF_OTHERS or LOST_CONNECTION in self.message

    @property
    def may_be_a_bug(self) -> bool:
        """True if the script is to blame when another pipeline raises the same."""
        return not self.follows_another and self.kind.rpartition(".")[2] != _NO_BUG

    def is_like(self, other: UncaughtException) -> bool:
        """Return whether the exceptions are the same, up to the numbers in their messages: an index, a rank, an
        address."""
        return self._key() == other._key()

    def __str__(self) -> str:
        text = f"{self.kind.rpartition('.')[2]}: {self.message}" if self.message else self.kind.rpartition(".")[2]
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"

    def _key(self) -> tuple[str, str, str]:
        return self.kind, self.place, _NUMBER.sub("#", self.message)

    def encode(self) -> bytes:
        """Encode the exception for :func:`decode` in another process; short enough for a pipe to take it at once."""
        return json.dumps(asdict(self)).encode() + b"\n"


def decode(said: bytes) -> UncaughtException | None:
    """Decode what :meth:`UncaughtException.encode` made; None if it is not whole."""
    try:
        return UncaughtException(**json.loads(said)) if said.endswith(b"\n") else None
    except (ValueError, TypeError):
        return None


def describe(error: BaseException) -> UncaughtException:
    """Describe ``error`` as it left the script."""
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    try:
        message = str(error).partition("\n")[0]
    except Exception as own:  # it must not hide the exception that is reported
        message = f"its text raised {type(own).__name__}"
    return UncaughtException(f"{module}{kind.__qualname__}", message[: 2 * _LONGEST], place_of(error))


def command(script: Sequence[str]) -> list[str]:
    """Return the command that runs ``script``: its path, or ``-m`` and a module's name, and its arguments."""
    return [sys.executable, "-c", f"from {__name__} import main; main()", *script]


def main() -> None:
    """Run the script on the command line."""
    _, *arguments = sys.argv
    process, report = os.getpid(), os.environ.pop(REPORT, None)
    if report is not None:
        os.set_inheritable(int(report), False)
    try:
        if arguments[0] == "-m":
            _run_module(*arguments[1:])
        else:
            _run_file(*arguments)
    except BaseException as error:
        if report is not None and os.getpid() == process:  # and not in a process that the script forked
            _tell(int(report), error)
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise
        sys.excepthook(type(error), error.with_traceback(_of_script(error)), error.__traceback__)
        sys.exit(1)


def _run_file(path: str, *arguments: str) -> None:
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    path = os.path.abspath(path)
    namespace = sys.modules["__main__"].__dict__
    namespace.clear()
    namespace |= {"__name__": "__main__", "__file__": path, "__builtins__": builtins, "__doc__": None}
    namespace |= {"__package__": None, "__spec__": None, "__loader__": SourceFileLoader("__main__", path)}
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, namespace)


def _run_module(name: str, *arguments: str) -> None:
    sys.argv = [name, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _tell(report: int, error: BaseException) -> None:
    if type(error) is SystemExit:  # Hydra may raise it for an exception that it has printed
        if not error.code or error.__context__ is None:
            return
        error = error.__context__
    with contextlib.suppress(OSError):  # the supervisor has gone
        os.write(report, describe(error).encode())


def _of_script(error: BaseException) -> TracebackType | None:
    """Return the frames of ``error``, without those that run the script."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return frames
