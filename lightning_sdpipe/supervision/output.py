"""Output of the processes: all of it goes into a log per pipeline, and the leader's also to the user's terminal."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lightning_sdpipe.scheduler.log.event_log import write_whole

_AT_ONCE = 1 << 12
_LONGEST_LINE = 1 << 16
_MOST_WAITING = 1024  # pieces of at most _AT_ONCE bytes
_PATIENCE = 5.0  # seconds at the end in which a reader takes what is left


class Log:
    """A log file. Lines that cannot be written, as on a full disk, are counted, and the count is written when there is
    space again."""

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._complain = complain
        self._missing = 0

    def write(self, line: bytes) -> None:
        """Write a line, given without its end."""
        try:
            if self._missing:
                write_whole(self._file.fileno(), f"\n--- {self._missing} lines could not be written ---\n".encode())
                self._missing = 0
            write_whole(self._file.fileno(), line + b"\n")
        except OSError as error:
            self._missing += 1
            if self._missing == 1:
                self._complain(f"{self.path} cannot be written now ({error.strerror}); the run continues without it")

    def close(self) -> None:
        self._file.close()


class Terminal:
    """The user's terminal, or what takes its place. A thread prints, so nothing else waits for a slow reader. What the
    reader misses is in the logs only.

    Make it before other files are opened: one of them could get the number of an output that was closed.
    """

    def __init__(self) -> None:
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a job in the background is not stopped for printing
        while (lowest := os.open(os.devnull, os.O_RDWR)) <= 2:  # takes the place of what was closed
            pass
        os.close(lowest)
        self._waiting: queue.Queue[tuple[int, bytes] | None] = queue.Queue(_MOST_WAITING)
        self._in_line = False
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        """Print ``line`` as a line of its own."""
        self._put(2, b"\n" * self._in_line + f"sdpipe: {line}\n".encode())
        self._in_line = False

    def show(self, data: bytes) -> None:
        """Print what a process has written."""
        self._put(1, data)
        self._in_line = not data.endswith(b"\n")

    def close(self) -> None:
        """Print what is left, if a reader takes it in some seconds."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_PATIENCE)
        self._thread.join(_PATIENCE)

    def _put(self, descriptor: int, data: bytes) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait((descriptor, data))

    def _run(self) -> None:
        while (piece := self._waiting.get()) is not None:
            descriptor, data = piece
            with contextlib.suppress(OSError):  # a closed terminal, or a full disk
                while data:  # another program that shares a pipe may have set it not to block
                    select.select([], [descriptor], [])
                    data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]


class Output:
    """What a process prints, read from ``source``: each line goes into ``log`` after ``prefix``, and all data to
    ``show`` as they come."""

    def __init__(self, source: int, log: Log, prefix: bytes, show: Callable[[bytes], None]) -> None:
        self.source = source
        self.last = b""
        """The last line."""
        self._log = log
        self._prefix = prefix
        self._show = show
        self._line = b""
        os.set_blocking(source, False)

    def read(self) -> bool | None:
        """Read what is there now, up to some amount; return None if there is nothing, and False at the end."""
        try:
            data = os.read(self.source, _AT_ONCE)
        except BlockingIOError:
            return None
        if data:
            self._show(data)
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._note(line)
        self._line = self._line[-_LONGEST_LINE:]
        return bool(data)

    def close(self) -> None:
        """Read what is there, and close. Another program may hold the other end and write on, so its end is not
        awaited."""
        deadline = time.monotonic() + _PATIENCE
        while self.read() and time.monotonic() < deadline:
            pass
        self._note(self._line)
        os.close(self.source)

    def _note(self, line: bytes) -> None:
        """Log a line that is not empty; of a progress bar that was redrawn many times, only its last state."""
        if shown := line.rstrip(b"\r").rpartition(b"\r")[2]:
            self._log.write(self._prefix + shown)
            self.last = shown
