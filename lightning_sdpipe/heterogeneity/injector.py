"""Slows down one worker, and records by how much."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from lightning_sdpipe import meter
from lightning_sdpipe.heterogeneity.delays import Delays, Pass
from lightning_sdpipe.heterogeneity.tracks import Track


@runtime_checkable
class Heterogeneity(Protocol):
    """A model of what slows workers down. Both methods are pure functions of their arguments."""

    def delay(self, stage: int, pipeline: int, iteration: int, during: Pass) -> float:
        """Return the seconds for which worker (stage, pipeline) sleeps before this pass of this iteration."""

    def track(self, rank: int) -> Track | None:
        """Return the speed of this rank's device over time; None for full speed."""


class DelayInjector:
    """Makes one worker sleep: for the drawn time before a pass, and after each computation until a device of the slow
    speed would have finished it.

    Args:
        heterogeneity: the slowness to inject.
        stage: the worker's stage.
        pipeline: the worker's pipeline.
        rank: its global rank.
        settle: waits until the device has computed all its work; without it, a computation ends when its call has
            returned.
        sleep: called with the seconds of each delay, never with 0.
        clock: returns monotonic seconds.
        core_wait: returns the seconds for which this thread was ready but had no core, which do not count as the
            device's time.
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
        self.injects = heterogeneity != Delays()
        """False if the worker is never slowed; unless it is measured, :meth:`computing` is then the meter's span."""
        self._settle = settle
        self._sleep = sleep
        self._clock = clock
        self._core_wait = core_wait or meter.seconds_without_a_core
        self.measures = False
        """Whether :attr:`computed_seconds` measures the device's speed. Then the injector waits for the device's
        work."""
        self._start: float | None = None
        self._iteration = 0
        self._by_iteration: defaultdict[int, float] = defaultdict(float)
        self._computed_seconds = 0.0

    def before_forward(self, iteration: int) -> None:
        """Inject the delay before the forward of each mini-batch."""
        self._iteration = iteration
        self._inject(iteration, "forward")

    def before_backward(self, iteration: int) -> None:
        """Inject the delay before the backward of each mini-batch."""
        self._inject(iteration, "backward")

    @property
    def slows(self) -> bool:
        """True if the worker sleeps after computations."""
        return self._track is not None

    def computing(
        self, share: float = 1.0, tell: Callable[[], None] | None = None, phase: int = meter.BACKWARD
    ) -> AbstractContextManager[None]:
        """Return a context for the worker's own arithmetic, which must not wait for others. ``tell`` is called when
        ``share`` of it is done on a slowed device, at the end on others, and not after an error. ``phase``: see
        :mod:`~lightning_sdpipe.meter`."""
        if tell is None and not self.injects and not self.measures:
            return meter.phase(phase)
        return Computing(self, share, tell, phase)

    @property
    def computed_seconds(self) -> float:
        """Seconds within :meth:`computing`, without injected sleep; the meter's if the worker has been neither slowed
        nor measured."""
        if self.injects or self.measures or self._computed_seconds:
            return self._computed_seconds
        return meter.current().seconds(meter.FORWARD, meter.BACKWARD)

    @property
    def injected_seconds(self) -> float:
        """Sum of all delays so far."""
        return math.fsum(self._by_iteration.values())

    @property
    def injected_by_iteration(self) -> dict[int, float]:
        """Seconds of delay in each iteration that had any."""
        return dict(self._by_iteration)

    def _computed(self, start: float, waited: float, share: float, tell: Callable[[], None] | None) -> None:
        """Sleep for the time by which a device of the slow speed would have computed longer since ``start``."""
        passed = work = self._clock() - start
        rest = 0.0
        if self._track is not None:
            assert self._start is not None
            work = max(0.0, passed - self._core_wait() + waited)
            whole = self._track.duration(start - self._start, work)
            before = max(0.0, share * whole - passed)
            rest = whole - passed - before
            self._record(self._iteration, before)
        if tell is not None:
            tell()
        if rest > 0.0:
            self._record(self._iteration, rest)
        self._computed_seconds += work

    def _inject(self, iteration: int, during: Pass) -> None:
        if self.injects:
            self._record(iteration, self.heterogeneity.delay(self.stage, self.pipeline, iteration, during))

    def _record(self, iteration: int, seconds: float) -> None:
        if seconds > 0.0:
            self._by_iteration[iteration] += seconds
            with meter.phase(meter.INJECTED):
                self._sleep(seconds)


class Computing:
    """The context that :meth:`DelayInjector.computing` returns for a slowed or measured worker."""

    __slots__ = ("_injector", "_share", "_span", "_start", "_tell", "_waited")

    def __init__(self, injector: DelayInjector, share: float, tell: Callable[[], None] | None, phase: int) -> None:
        self._injector, self._share, self._tell = injector, share, tell
        self._span = meter.phase(phase)

    def __enter__(self) -> None:
        injector = self._injector
        self._start = injector._clock()
        if injector._start is None:
            injector._start = self._start
        self._waited = injector._core_wait() if injector._track is not None else 0.0
        self._span.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        injector = self._injector
        try:
            if kind is None and injector._settle is not None and (injector.measures or injector.slows):
                injector._settle()
        finally:
            self._span.__exit__()
        if kind is None:
            injector._computed(self._start, self._waited, self._share, self._tell)
