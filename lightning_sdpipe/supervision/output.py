"""Output of the processes: all of it goes into a log per pipeline, and that of one process on to the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from lightning_sdpipe.scheduler.log.event_log import write_whole

_AT_ONCE = 1 << 16
_LONGEST_LINE = 1 << 16


class Terminal:
    """The user's terminal: lines of the supervisor, between the output of a process. No other part waits for it, or
    fails because of it.

    Lines of the supervisor go into the file ``log`` as well, once it is set.
    """

    def __init__(self) -> None:
        writer = Writer(1)
        self._writers = {1: writer, 2: writer if os.path.sameopenfile(1, 2) else Writer(2)}  # only one keeps order
        self._in_line = False
        self.log: Log | None = None

    def say(self, line: str) -> None:
        """Print ``line`` as a line of its own."""
        before = b"\n" if self._in_line else b""
        self._in_line = False
        self._writers[2].put(before + f"sdpipe: {line}\n".encode(), important=True)
        if self.log is not None:
            self.log.write("", time.strftime("%Y-%m-%d %H:%M:%S ").encode() + line.encode())

    def pass_on(self, descriptor: int, data: bytes) -> None:
        """Print what a process has written to 1 or 2."""
        self._in_line = not data.endswith(b"\n")
        self._writers[descriptor].put(data)

    def close(self) -> None:
        """Write what is left, waiting for a reader that reads."""
        for writer in self._writers.values():
            writer.close()
        if self.log is not None:
            self.log.close()

    def is_terminal(self, descriptor: int) -> bool:
        return os.isatty(descriptor)

    def size(self) -> bytes | None:
        """Return rows and columns as the system writes them; None if the terminal is none, or gone."""
        for descriptor in self._writers:
            if os.isatty(descriptor):
                with contextlib.suppress(OSError):
                    return fcntl.ioctl(descriptor, termios.TIOCGWINSZ, b"\0" * 8)
        return None


class Log:
    """The log file of one pipeline: lines of its stages, each with the stage's number.

    Lines that cannot be written are counted, and the count is written when there is space again.
    """

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self.path = path
        self._file: BinaryIO | None = path.open("ab", buffering=0)
        self._complain = complain
        self._missing = 0

    def write(self, prefix: str, line: bytes) -> None:
        """Write a line, given without its end. Of a progress bar that was redrawn many times, only the last state is
        written."""
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]
        if self._file is None or (line and not shown):
            return
        try:
            if self._missing:
                write_whole(self._file.fileno(), f"\n--- {self._missing} lines could not be written ---\n".encode())
                self._missing = 0
            write_whole(self._file.fileno(), prefix.encode() + shown + b"\n")
        except OSError as error:
            self._missing += 1
            if self._missing == 1:
                self._complain(f"{self.path} cannot be written now ({error.strerror}); the run goes on without it")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class OutputStream:
    """One of the two outputs of a process, or both where they are one terminal. ``shown`` says whether the terminal
    shows it."""

    def __init__(
        self, source: int, descriptor: int, log: Log, prefix: str, terminal: Terminal, shown: Callable[[], bool]
    ) -> None:
        self.source = source
        self._descriptor = descriptor
        self._log = log
        self._prefix = prefix
        self._terminal = terminal
        self._shown = shown
        self._line = b""
        os.set_blocking(source, False)

    def read(self) -> bool:
        """Read what is there now, up to some amount; return False at the end."""
        return self._read() != b""

    def _read(self) -> bytes | None:
        try:
            data = os.read(self.source, _AT_ONCE)
        except BlockingIOError:
            return None
        except OSError:  # a pseudo-terminal reports so that its last writer is gone
            data = b""
        if data:
            self._take(data)
        return data

    def close(self) -> None:
        """Close the stream after what can still be read at once. Another program may hold the other end, so its end is
        not awaited."""
        while self._read():
            pass
        if self._line:
            self._log.write(self._prefix, self._line)
            self._line = b""
        os.close(self.source)

    def resize(self, size: bytes) -> None:
        """Set the size, if the stream is a terminal."""
        if os.isatty(self.source):
            fcntl.ioctl(self.source, termios.TIOCSWINSZ, size)

    def _take(self, data: bytes) -> None:
        if self._shown():
            self._terminal.pass_on(self._descriptor, data)
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._log.write(self._prefix, line)
        self._line = self._line[-_LONGEST_LINE:]


def open_outputs(terminal: Terminal | None) -> tuple[dict[int, int], tuple[int, int]]:
    """Return where a process's output is read, by descriptor of the process (1 or 2), and the two ends that it gets.

    An output that is a terminal in ``terminal`` is one for the process as well, so that progress bars look as they
    should.
    """
    if terminal is not None and terminal.is_terminal(1) and terminal.is_terminal(2):
        ours, theirs = _pseudo_terminal(terminal)
        return {1: ours}, (theirs, theirs)
    sources, ends = {}, []
    for descriptor in (1, 2):
        if terminal is not None and terminal.is_terminal(descriptor):
            ours, theirs = _pseudo_terminal(terminal)
        else:
            ours, theirs = os.pipe()
        sources[descriptor] = ours
        ends.append(theirs)
    return sources, (ends[0], ends[1])


def own_terminal() -> Terminal:
    """Return the terminal of this process, which is then not stopped for writing to it from the background.

    Call it before other files are opened: one of them could get the number of an output that was closed.
    """
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number, which is this one
    return Terminal()


def _pseudo_terminal(terminal: Terminal) -> tuple[int, int]:
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    size = terminal.size()
    if size is not None and struct.unpack("HHHH", size)[0]:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    return ours, theirs


BUFFERED = 1 << 20
"""Most bytes that wait to be written; as many again may be important ones."""
_AT_ONCE = 1 << 12
_PATIENCE = 1.0  # seconds at the end within which a reader must take something


class Writer:
    """Writes to one descriptor, in a thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: deque[bytes | int] = deque()  # data to write, and how many bytes were dropped in between
        self._size = 0
        self._taken = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, data: bytes, important: bool = False) -> None:
        """Queue ``data`` to be written. Never waits, never raises."""
        with self._changed:
            if self._closing:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
                self._thread.start()
            if self._size + len(data) <= (2 * BUFFERED if important else BUFFERED):
                self._waiting.append(data)
                self._size += len(data)
            elif self._waiting and isinstance(last := self._waiting[-1], int):
                self._waiting[-1] = last + len(data)
            else:
                self._waiting.append(len(data))
            self._changed.notify()

    def close(self) -> None:
        """Wait for what is left, as long as some of it is taken every second."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        taken, until = self._taken, time.monotonic() + _PATIENCE
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < until:
            self._thread.join(0.02)
            if self._taken != taken:
                taken, until = self._taken, time.monotonic() + _PATIENCE

    def _run(self) -> None:
        dropped, why = 0, ""
        while (next_one := self._next()) is not None:
            data = b"" if isinstance(next_one, int) else next_one
            dropped += next_one if isinstance(next_one, int) else 0
            try:
                if dropped:
                    because = f" ({why})" if why else ", since they were not taken"
                    self._write(f"\nsdpipe: {dropped} bytes of output were dropped here{because}\n".encode())
                    dropped, why = 0, ""
                self._write(data)
            except OSError as error:
                dropped, why = dropped + len(data), error.strerror or str(error)

    def _next(self) -> bytes | int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if not self._waiting:
                return None
            found = self._waiting.popleft()
            self._size -= 0 if isinstance(found, int) else len(found)
            return found

    def _write(self, data: bytes) -> None:
        while data:
            try:
                written = os.write(self._descriptor, data[:_AT_ONCE])
            except BlockingIOError:  # another program that shares the pipe has set it so
                select.select([], [self._descriptor], [])
                continue
            data = data[written:]
            self._taken += 1
