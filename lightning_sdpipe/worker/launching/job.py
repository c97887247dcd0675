"""One job of this process, and the functions that undo it at its end: a sweep runs many jobs in one process.

A job ends with the process, when the next one begins, or when :func:`end` is called.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_sdpipe.scheduler.client.client import Failure
from lightning_sdpipe.worker.launching import hydra_job

_undo = ExitStack()
_key: object = None


def begin() -> None:
    """Begin a job, before anything of it is set up; end the previous job if this is another one."""
    global _key
    key = hydra_job.key()
    if key != _key:
        end()
        _key = key


def at_end(function: Callable[..., Any], *arguments: Any) -> None:
    """Call ``function(*arguments)`` at the end of the job; functions are called in reverse order."""
    _undo.callback(function, *arguments)


@atexit.register
def end() -> None:
    """Undo what the job has left in this process; do nothing if nothing is left."""
    _undo.close()


_PATIENCE = 2.0  # seconds in which a worker that computes, or waits for the scheduler, ends by itself


class Watchdog:
    """A timer that is armed when another worker has failed, and disarmed when this one has noticed."""

    def __init__(self, describe: Callable[[Failure], str], give_up: Callable[[], None]) -> None:
        self._describe = describe
        self._give_up = give_up
        self._timer: threading.Timer | None = None
        self._noticed = False

    def arm(self, failure: Failure) -> None:
        if not self._noticed:
            self._timer = threading.Timer(_PATIENCE, self._end, [failure])
            self._timer.daemon = True
            self._timer.start()

    def disarm(self) -> None:
        self._noticed = True
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, failure: Failure) -> None:
        print(self._describe(failure), file=sys.stderr, flush=True)
        self._give_up()
