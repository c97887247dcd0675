"""What a worker's training thread does: one phase at a time, and how long.

A thread has a meter of its own, so that what others do beside training does not count. Phases are entered and left as
on a stack, and time counts for the one on top: a forward from 0 to 9 around a sleep from 3 to 5 is 7 of forward and 2
of injected. At the end of an update the time since the one before is a :class:`MeterRow` of whole microseconds, in
which nothing is lost or counted twice. None of a worker's own time waits for another worker: it tells a slow one from
those that wait for it.

The newest spans are kept, too: what was on top from when to when, but for ``other``, with marks in between: where an
update has ended, and which message to a neighbour of the pipeline was sent or had come.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import sub
from typing import NamedTuple

PHASES = (
    *("other", "data", "forward", "backward", "optimizer", "injected", "gc"),
    *("wait_up", "wait_down", "send", "wait_stage", "wait_group", "exchange"),
)
"""``other`` is what no span is around. ``wait_up`` is for activations of the stage before, ``wait_down`` for gradients
of the next, ``send`` until a neighbour has taken what was sent, and ``wait_stage`` anything else of the own pipeline's;
``wait_group`` is for replicas, and ``exchange`` moves tensors between them."""
OTHER, DATA, FORWARD, BACKWARD, OPTIMIZER, INJECTED, GC, WAIT_UP, WAIT_DOWN, SEND, WAIT_STAGE, WAIT_GROUP, EXCHANGE = (
    range(len(PHASES))
)
OWN = WAIT_UP
"""So many of the phases, the first ones, are a worker's own time."""
FOR_NEIGHBOURS = WAIT_UP, WAIT_DOWN, SEND

UPDATE, START, SENT, RECEIVED, HIDDEN = -1, -2, -3, -4, -5
"""Marks among the spans: the update of that number has ended; what came before belongs to none; a message was sent, or
had come; and a span of another thread of this worker, which moved tensors beside the training."""
LANES = 1 << 16
"""A message is marked by its number on its lane, times this, plus the lane's, which both ends know it by."""
SPANS = 16384
"""That are kept, marks included."""

CLOCK = time.perf_counter_ns


class MeterRow(NamedTuple):
    """An update: microseconds of each phase, and those in which the thread was ready to run and had no core. ``ended``
    is the time of :data:`CLOCK`. ``follows``: it began where another row has ended. ``apart``: see :class:`Meter`."""

    us: tuple[int, ...]
    core: int
    ended: int
    follows: bool
    apart: int = 0


class Span:
    """A phase, as a context; the same object may be entered again and again."""

    __slots__ = ("_meter", "_phase")

    def __init__(self, meter: Meter, phase: int) -> None:
        self._meter, self._phase = meter, phase

    def __enter__(self) -> None:
        self._meter.enter(self._phase)

    def __exit__(self, *_: object) -> None:
        self._meter.leave()


_NO_SPAN: AbstractContextManager[None] = contextlib.nullcontext()


class Meter:
    """A thread's; see the module's text.

    Args:
        clock: nanoseconds.
        core_wait: nanoseconds that the thread was ready and had no core; as Linux counts them by default.
    """

    def __init__(self, clock: Callable[[], int] = CLOCK, core_wait: Callable[[], int] | None = None) -> None:
        self.spans = [Span(self, phase) for phase in range(len(PHASES))]
        """Of each phase."""
        self.core_wait = core_wait or self._core_wait
        self.apart = 0
        """How far the model was from the mean of its group in this update, in millionths of the mean; 0 if that was not
        looked at."""
        self.kept: deque[tuple[int, int, int]] = deque(maxlen=SPANS)
        """Spans, each a phase, its begin and its end; and marks: what, the time, and the number."""
        self._clock = clock
        self._totals = [0] * len(PHASES)
        self._stack = [OTHER]
        self._since = clock()
        self._marked = self._follows = False
        self._mark = [0] * len(PHASES)
        """Microseconds of each phase at the end of the last update, and of ``core_wait``."""
        self._core_mark = 0
        self._waited = 0.0
        self._descriptor: int | None = None
        self._closer: weakref.finalize[..., Meter] | None = None

    def enter(self, phase: int) -> None:
        """Time counts for ``phase`` from now on."""
        self._count()
        self._stack.append(phase)

    def leave(self) -> None:
        """Time counts for the phase before again."""
        self._count()
        self._stack.pop()

    def waiting(self) -> AbstractContextManager[None]:
        """Around a wait for another worker: ``wait_stage``, unless what waits has said which wait it is."""
        return self.spans[WAIT_STAGE] if self._stack[-1] < OWN else _NO_SPAN

    def seconds(self, *phases: int) -> float:
        """In all of these phases, since this thread began."""
        return sum(self._totals[phase] for phase in phases) / 1e9

    def start(self) -> None:
        """What passed before now belongs to no update."""
        self._marked = False
        self.mark(START)

    def mark(self, what: int, number: int = 0) -> None:
        """At the last change of phase."""
        self.kept.append((what, self._since, number))

    def recent(self, updates: int, until: int) -> list[tuple[int, int, int]]:
        """What is kept of the last so many updates that had ended at ``until``, and of what was between them; for any
        thread."""
        kept = list(self.kept)  # at once, as long as one thread runs Python at a time
        ends = [index for index, (what, at, _) in enumerate(kept) if what == UPDATE and at <= until]
        return kept[ends[max(0, len(ends) - 1 - updates)] : ends[-1] + 1] if len(ends) > 1 else []

    def update_ended(self, waited: float) -> MeterRow | None:
        """An update is over; ``waited`` are all seconds so far that the exchange knows it has waited for replicas. None
        for the first one after :meth:`start`, which only marks the beginning of the next."""
        self._count()
        totals, more, self._waited = self._totals, waited - self._waited, waited
        if self._marked:
            moved = min(max(0, round(more * 1e9)), totals[EXCHANGE] - 1000 * self._mark[EXCHANGE])
            totals[EXCHANGE] -= moved
            totals[WAIT_GROUP] += moved
        core, mark = self.core_wait() // 1000, [total // 1000 for total in totals]
        row = None
        if self._marked:
            us = tuple(map(sub, mark, self._mark))
            row = MeterRow(us, core - self._core_mark, self._since, self._follows, self.apart)
        self.apart = 0
        self._follows, self._marked, self._mark, self._core_mark = self._marked, True, mark, core
        return row

    def close(self) -> None:
        """Frees what it reads from."""
        if self._closer is not None:
            self._closer()

    def _count(self) -> None:
        now = self._clock()
        passed = now - self._since
        if passed > 0:  # else garbage was collected behind the look at the clock, which has counted until later
            phase, since = self._stack[-1], self._since
            self._totals[phase] += passed
            self._since = now  # before anything is made, which may collect garbage
            if phase:
                self.kept.append((phase, since, now))

    def _core_wait(self) -> int:
        if self._descriptor is None:
            try:
                self._descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            except OSError:  # another system
                self._descriptor = -1
            else:
                self._closer = weakref.finalize(self, os.close, self._descriptor)
        return 0 if self._descriptor < 0 else int(os.pread(self._descriptor, 64, 0).split()[1])


class _Local(threading.local):
    meter: Meter | None = None


_local = _Local()


def current() -> Meter:
    """This thread's."""
    meter = _local.meter
    if meter is None:
        meter = _local.meter = Meter()
    return meter


def phase(number: int) -> Span:
    """Around what belongs to that phase."""
    return current().spans[number]


def seconds_without_a_core() -> float:
    """How long this thread has waited for a core so far, as Linux counts it; 0 where nothing counts."""
    return current().core_wait() / 1e9


def _forget() -> None:
    """In a forked process: what is read of is the parent's thread."""
    meter, _local.meter = _local.meter, None
    if meter is not None:
        meter.close()


def _collecting(event: str, info: dict[str, int], local: _Local = _local, gc: int = GC) -> None:
    """A full collection of garbage stops the thread that it happens in. When Python ends, it finds no global names."""
    meter = local.meter
    if meter is not None and info["generation"] == 2:
        if event == "start":
            meter.enter(gc)
        else:
            meter.leave()


os.register_at_fork(after_in_child=_forget)
gc.callbacks.append(_collecting)
