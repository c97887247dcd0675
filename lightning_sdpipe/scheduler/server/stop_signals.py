"""Lets a program wait for signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals(*numbers: signal.Signals) -> Iterator[int]:
    """Yield a file descriptor that becomes readable when one of the signals arrives, whatever the main thread does.

    A handler alone is not enough: it runs in the main thread, which may be about to wait inside ZeroMQ. The
    descriptor is written by the interpreter's own part of signal handling.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    wakeup_before = signal.set_wakeup_fd(write_end)
    handlers = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
    try:
        yield read_end
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        os.close(write_end)
        os.close(read_end)
