"""Slowing of one worker, with a record of it."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from lightning_sdpipe import meter
from lightning_sdpipe.heterogeneity.delays import Delays, Pass
from lightning_sdpipe.heterogeneity.tracks import Track


@runtime_checkable
class Heterogeneity(Protocol):
    """A model of what slows workers down. Both methods are pure: the same arguments give the same result."""

    def delay(self, stage: int, pipeline: int, iteration: int, during: Pass) -> float:
        """Returns the seconds for which worker (stage, pipeline) sleeps before this pass of this iteration."""

    def track(self, rank: int) -> Track | None:
        """Returns the speed of this rank's device over time; None for full speed."""


class DelayInjector:
    """Lets one worker sleep: for the drawn time before a pass, and after each computation until a device of the slow
    speed would have finished it.

    Args:
        heterogeneity: the slowness to inject.
        stage: the worker's stage.
        pipeline: the worker's pipeline.
        rank: its global rank.
        settle: waits until the device has computed all its work; without it, a computation ends when its call has
            returned.
        sleep: called with the seconds of each delay, never with 0.
        clock: monotonic seconds.
        core_wait: gives the seconds for which this thread was ready and had no core, which are not the device's time.
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
        self._core_wait = core_wait or meter.seconds_without_a_core
        self.measures = False
        """Whether :attr:`computed_seconds` is used to measure the device's speed. Then the injector waits for the
        device's work."""
        self._start: float | None = None
        self._iteration = 0
        self._by_iteration: defaultdict[int, float] = defaultdict(float)
        self.computed_seconds = 0.0
        """Seconds inside of :meth:`computing`, without what was injected there."""

    def before_forward(self, iteration: int) -> None:
        """Injects the delay before the forward of each mini-batch."""
        self._iteration = iteration
        self._inject(iteration, "forward")

    def before_backward(self, iteration: int) -> None:
        """Injects the delay before the backward of each mini-batch."""
        self._inject(iteration, "backward")

    @property
    def slows(self) -> bool:
        """True if the worker sleeps after computations."""
        return self._track is not None

    @contextmanager
    def computing(
        self, share: float = 1.0, tell: Callable[[], None] = lambda: None, phase: int = meter.BACKWARD
    ) -> Iterator[None]:
        """Surrounds all of the worker's own arithmetic, and nothing that waits for others. ``tell`` is called when
        ``share`` of it is over on a device that is made slow, at the end on others. ``phase``: see
        :mod:`~lightning_sdpipe.meter`."""
        start = self._clock()
        if self._start is None:
            self._start = start
        waited = self._core_wait() if self._track else 0.0
        with meter.phase(phase):
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
            with meter.phase(meter.INJECTED):
                self._sleep(seconds)
