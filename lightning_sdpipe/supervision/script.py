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
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import TracebackType

from lightning_sdpipe.supervision.uncaught_exception import describe

REPORT = "SDPIPE_REPORT"
"""Environment variable with the descriptor; the script does not see it."""


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
