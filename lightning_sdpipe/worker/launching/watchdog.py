"""Ends a worker that cannot end by itself.

gloo offers no way to wake a thread that waits for a tensor of another process while that process lives, or for one that
was under way when the connection was lost. So when a run is over and a worker has not noticed within a few seconds,
another thread prints the reason and gives up. It also looks whether what is waited for can still come.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from lightning_sdpipe import p2p
from lightning_sdpipe.scheduler.client.client import Failure

_PATIENCE = 2.0  # seconds in which a worker that computes, or waits for the scheduler, ends by itself
_LOOK = 2.0  # seconds between two looks


class Watchdog:
    """A timer that is armed when another worker has failed, and disarmed when this one has noticed.

    Args:
        describe: describes a failure, for people.
        give_up: ends this process's wait.
        lost: called once, in another thread, when the connection has ended over which this worker waits for a message.
    """

    def __init__(
        self, describe: Callable[[Failure], str], give_up: Callable[[], None], lost: Callable[[str], None]
    ) -> None:
        self._describe = describe
        self._give_up = give_up
        self._lost = lost
        self._timer: threading.Timer | None = None
        self._noticed = threading.Event()
        self._looking = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def watch(self) -> None:
        """Look from now on, until it is disarmed, whether what is waited for can come."""
        self._looking.start()

    def arm(self, failure: Failure) -> None:
        if not self._noticed.is_set():
            self._timer = threading.Timer(_PATIENCE, self._end, [failure])
            self._timer.daemon = True
            self._timer.start()

    def disarm(self) -> None:
        self._noticed.set()
        if self._looking.is_alive():
            self._looking.join(_PATIENCE)  # it refers to process groups, which must not outlive the interpreter there
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        before: set[p2p.Transfer] = set()
        while not self._noticed.wait(_LOOK):
            now = p2p.waited_for()
            for error in (transfer.lost() for transfer in before & now):
                if error is not None:
                    self._lost(str(error))
                    return
            before = now

    def _end(self, failure: Failure) -> None:
        print(self._describe(failure), file=sys.stderr, flush=True)
        self._give_up()
