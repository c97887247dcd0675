"""Ends a worker that cannot end by itself.

gloo offers no way to wake a thread that waits for a tensor of another process while that process lives. So when a run
is over and a worker has not noticed within a few seconds, another thread prints the reason and gives up.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from lightning_sdpipe.scheduler.client.client import Failure

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
