"""How long a worker's steps take lately, for its heartbeats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lightning_sdpipe.scheduler.protocol import Steps


class StepTimer:
    """Told of each step by the training thread, asked by the heartbeats'."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ended_at: float | None = None
        self._waited = 0.0
        self._steps: Steps | None = None

    def start(self) -> None:
        """What passed before now belongs to no step."""
        self._ended_at = None

    def ended(self, iteration: int, waited: float) -> None:
        """A step is over; ``waited`` are all seconds of waiting so far. The first one after :meth:`start` only marks
        the beginning of the next."""
        now, before = self._clock(), self._ended_at
        waiting, self._waited, self._ended_at = waited - self._waited, waited, now
        if before is None:
            return
        with self._lock:
            last = self._steps or Steps(iteration, 0, 0.0, 0.0)
            count = last.count + 1
            seconds = last.seconds + (now - before - last.seconds) / count
            self._steps = Steps(iteration, count, seconds, last.waiting + (waiting - last.waiting) / count)

    def take(self) -> Steps | None:
        """The steps since this was last asked; None if there were none."""
        with self._lock:
            steps, self._steps = self._steps, None
        return steps
