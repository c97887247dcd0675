"""Processes that end with the supervisor, and everything that they have started with them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_TIED, _KEPT = (str(Path(__file__).with_name(name)) for name in ("die_with_parent.py", "stay_with_child.py"))


class Keeper:
    """A process that kills the groups of running children when this process ends, even by SIGKILL."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _KEPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def knows(self, group: int, lives: bool) -> None:
        """Tell the keeper of a ``group`` that is to be killed, or, if it no longer ``lives``, is to be forgotten."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # another program has killed it; the kernel does the most part then
            self._process.stdin.write(f"{'+' if lives else '-'}{group}\n".encode())

    def close(self) -> None:
        """End the keeper, which kills the groups that it was not told to forget."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Child:
    """A running program, in a session of its own: Ctrl-C in a terminal does not reach it, and it leads a process group.

    It is killed when this process ends, even by SIGKILL, so it must be started by the main thread. With a ``keeper``,
    so are the programs that it has started, in its process group. ``outputs`` are the descriptors that it writes to,
    and ``more`` others that it gets by the same numbers; all are closed here.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        outputs: tuple[int, int],
        more: Sequence[int] = (),
        keeper: Keeper | None = None,
    ) -> None:
        self._keeper = keeper
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", _TIED, str(os.getpid()), *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=outputs[0],
                stderr=outputs[1],
                start_new_session=True,
                pass_fds=[*more],
            )
        finally:
            for descriptor in {*outputs, *more}:
                os.close(descriptor)
        if keeper is not None:
            keeper.knows(self.pid, lives=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        """Return whether the program has ended. Its number is not given to another process before :meth:`bury`."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def signal(self, number: int) -> None:
        """Send a signal to the program alone; SIGKILL also to all that it has started."""
        if self._process.returncode is not None:
            return
        if number == signal.SIGKILL:
            self._kill_group()
        elif not self.has_ended():
            os.kill(self.pid, number)

    def bury(self) -> int:
        """Kill what the program, which has ended, has left; return its exit code, or −1 times the signal."""
        if self._process.returncode is None:
            self._kill_group()
            if self._keeper is not None:
                self._keeper.knows(self.pid, lives=False)
        return self._process.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # not yet a group: it is killed below
            os.killpg(self.pid, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)  # at worst it has ended and waits to be buried
