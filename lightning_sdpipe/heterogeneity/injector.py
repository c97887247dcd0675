"""Making one worker slow, and keeping the account of it."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

from lightning_sdpipe.heterogeneity.delays import Delays, Pass
from lightning_sdpipe.heterogeneity.tracks import Track


@runtime_checkable
class Heterogeneity(Protocol):
    """What slows workers down. Both methods are pure: the same question gets the same answer."""

    def delay(self, stage: int, pipeline: int, iteration: int, during: Pass) -> float:
        """Seconds that worker (stage, pipeline) sleeps before this pass of this iteration."""

    def track(self, rank: int) -> Track | None:
        """How fast the device of this global rank is over time; None for full speed."""


class DelayInjector:
    """Lets one worker sleep: as long as drawn before a pass, and after each computation until a device as slow as this
    one would have finished it.

    Args:
        heterogeneity: what to inject.
        stage: the worker's stage.
        pipeline: the worker's pipeline.
        rank: its global rank.
        settle: returns once the device has computed all that it was given; without it, once the call has returned.
        sleep: called with the seconds of each delay, never with 0.
        clock: monotonic seconds.
        core_wait: seconds that this thread was ready and had no core: no device's time.
    """

    def __init__(
        self,
        heterogeneity: Heterogeneity,
        stage: int,
        pipeline: int,
        rank: int = 0,
        *,
        settle: Callable[[], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
        core_wait: Callable[[], float] | None = None,
    ) -> None:
        self.heterogeneity = heterogeneity
        self.stage = stage
        self.pipeline = pipeline
        self._track = heterogeneity.track(rank)
        self._never = heterogeneity == Delays()
        self._settle = settle
        self._sleep = sleep
        self._clock = clock
        self._core_wait = core_wait or seconds_without_a_core
        self.measures = False
        """Is :attr:`computed_seconds` used to tell how fast the device is? Then it waits for what that was given."""
        self._start: float | None = None
        self._iteration = 0
        self._by_iteration: defaultdict[int, float] = defaultdict(float)
        self.computed_seconds = 0.0
        """Inside of :meth:`computing`, without what was injected there."""

    def before_forward(self, iteration: int) -> None:
        """To be called before the forward of each mini-batch."""
        self._iteration = iteration
        self._inject(iteration, "forward")

    def before_backward(self, iteration: int) -> None:
        """To be called before the backward of each mini-batch."""
        self._inject(iteration, "backward")

    @property
    def slows(self) -> bool:
        """Does it sleep after computations?"""
        return self._track is not None

    @contextmanager
    def computing(self, share: float = 1.0, tell: Callable[[], None] = lambda: None) -> Iterator[None]:
        """To be held around all of the worker's own arithmetic, and nothing that waits for others. ``tell`` is called
        when such a share of it is over on a device that is made slow, at the end on others."""
        start = self._clock()
        if self._start is None:
            self._start = start
        waited = self._core_wait() if self._track else 0.0
        yield
        if self._settle is not None and (self.measures or self._track is not None):
            self._settle()
        passed = work = self._clock() - start
        if self._track is not None:
            work = max(0.0, passed - self._core_wait() + waited)
            whole = self._track.duration(start - self._start, work)
            before = max(0.0, share * whole - passed)
            self._record(self._iteration, before)
            tell()
            self._record(self._iteration, whole - passed - before)
        else:
            tell()
        self.computed_seconds += work

    @property
    def injected_seconds(self) -> float:
        """Sum of all delays so far."""
        return math.fsum(self._by_iteration.values())

    @property
    def injected_by_iteration(self) -> dict[int, float]:
        """Seconds of delay in each iteration that had any."""
        return dict(self._by_iteration)

    def _inject(self, iteration: int, during: Pass) -> None:
        if not self._never:
            self._record(iteration, self.heterogeneity.delay(self.stage, self.pipeline, iteration, during))

    def _record(self, iteration: int, seconds: float) -> None:
        if seconds > 0.0:
            self._by_iteration[iteration] += seconds
            self._sleep(seconds)


def seconds_without_a_core() -> float:
    """How long this thread has waited for a core so far, as Linux counts it; 0 elsewhere."""
    try:
        _, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(waited) / 1e9
