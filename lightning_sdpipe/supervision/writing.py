"""Output that never makes the supervisor wait, and never ends it.

The output may go to a pipe that is not read, a terminal that is stopped (Ctrl-S) or gone, or a full disk. A thread
writes it, and as much as a buffer holds waits for that. Output that does not fit, or cannot be written, is dropped and
counted, and the count is written as soon as something can be.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque

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
