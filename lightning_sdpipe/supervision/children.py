"""Processes that end with the supervisor, together with everything that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

_TIED, _KEPT = (str(Path(__file__).with_name(name)) for name in ("die_with_parent.py", "stay_with_child.py"))


class Children:
    """Running programs, each in a session of its own: Ctrl-C in a terminal does not reach it, and it leads a process
    group.

    A program is killed when this process ends, even by SIGKILL, so it must be started by the main thread. What it has
    started in its process group is then killed by another process, the keeper.
    """

    def __init__(self) -> None:
        keeper = [sys.executable, "-I", "-S", _KEPT]
        self._keeper = Popen(keeper, bufsize=0, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)

    def start(self, command: Sequence[str], environment: Mapping[str, str], output: int) -> Popen[bytes]:
        """Start a program that prints to the descriptor ``output``, which is closed here."""
        tied = [sys.executable, "-I", "-S", _TIED, str(os.getpid()), *command]
        try:
            process = Popen(tied, env=environment, stdin=DEVNULL, stdout=output, stderr=output, start_new_session=True)
        finally:
            os.close(output)
        self._tell_keeper(f"+{process.pid}\n")
        return process

    def bury(self, process: Popen[bytes]) -> int:
        """Kill the program, if it has not ended, and what it has left; return its exit code, or −1 times the signal."""
        stop(process, signal.SIGKILL)
        self._tell_keeper(f"-{process.pid}\n")
        return process.wait()

    def close(self) -> None:
        """End the keeper, which kills the groups of programs that have not been buried."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()

    def _tell_keeper(self, line: str) -> None:
        assert self._keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # another program has killed it; the kernel still kills the children
            self._keeper.stdin.write(line.encode())


def has_ended(process: Popen[bytes]) -> bool:
    """Return whether the program has ended. Its number is not given to another process before it is buried."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def stop(process: Popen[bytes], number: int) -> None:
    """Send a signal to the program alone, which is not buried yet; SIGKILL also to all that it has started."""
    with contextlib.suppress(ProcessLookupError):  # it has ended, and left nothing
        (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)
