"""Measures how long a worker's training thread spends in each phase.

Each thread has its own meter, so work beside training does not count. Phases form a stack, and time counts for the top
one: a forward from 0 to 9 around a sleep from 3 to 5 is 7 of forward and 2 of injected. At the end of an update, the
time since the previous one becomes a :class:`MeterRow` of whole microseconds, in which nothing is lost or counted
twice. A worker's own time excludes waits for other workers, which tells a slow worker from those that wait for it.

The newest spans are kept, too: the phase on top, except ``other``, with its beginning and end. Marks between them tell
when an update ended, and when a message to or from a neighbour in the pipeline was sent or had come.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import sub
from types import FrameType
from typing import NamedTuple

PHASES = (
    *("other", "data", "forward", "backward", "optimizer", "injected", "gc"),
    *("wait_up", "wait_down", "send", "wait_stage", "wait_group", "exchange"),
)
"""Phases of a training thread. ``other`` is the time outside all spans. ``wait_up`` waits for activations from the
previous stage, ``wait_down`` for gradients from the next, ``send`` for a neighbour to take a message, and
``wait_stage`` for anything else in the same pipeline; ``wait_group`` waits for replicas, and ``exchange`` moves tensors
between them."""
OTHER, DATA, FORWARD, BACKWARD, OPTIMIZER, INJECTED, GC, WAIT_UP, WAIT_DOWN, SEND, WAIT_STAGE, WAIT_GROUP, EXCHANGE = (
    range(len(PHASES))
)
OWN = WAIT_UP
"""The phases below this number are a worker's own time."""
FOR_NEIGHBOURS = WAIT_UP, WAIT_DOWN, SEND

UPDATE, START, SENT, RECEIVED, HIDDEN = -1, -2, -3, -4, -5
"""Marks among the spans: the update of that number has ended; earlier time belongs to no update; a message was sent, or
had come; another thread of this worker moved tensors beside the training."""
LANES = 1 << 16
"""A message's mark has the number LANES × its number on its lane + the lane's number, which both ends know."""
SPANS = 16384
"""Number of spans and marks that are kept."""

CLOCK = time.perf_counter_ns
_AGAIN = 0.01
"""Seconds after which an interrupt that came during a garbage collection is raised again."""


class MeterRow(NamedTuple):
    """The times of an update: microseconds in each phase, and microseconds in which the thread was ready to run but had
    no core. ``ended`` is a time of the meter's clock; ``follows`` says that the row began where another ended."""

    us: tuple[int, ...]
    core: int
    ended: int
    follows: bool


class Span:
    """A phase, as a context that can be entered repeatedly."""

    __slots__ = ("_meter", "_phase")

    def __init__(self, meter: Meter, phase: int) -> None:
        self._meter, self._phase = meter, phase

    def __enter__(self) -> None:
        self._meter.change().append(self._phase)

    def __exit__(self, *_: object) -> None:
        self._meter.change().pop()


_NO_SPAN: AbstractContextManager[None] = contextlib.nullcontext()


class Meter:
    """The meter of a thread; see the module's docstring.

    Args:
        clock: returns nanoseconds.
        core_wait: returns the nanoseconds for which the thread was ready to run but had no core; by default those that
            Linux counts.
    """

    def __init__(self, clock: Callable[[], int] = CLOCK, core_wait: Callable[[], int] | None = None) -> None:
        self.spans = [Span(self, phase) for phase in range(len(PHASES))]
        """The context of each phase."""
        self.core_wait = core_wait or self._core_wait
        self.kept: deque[tuple[int, int, int]] = deque(maxlen=SPANS)
        """Spans (phase, begin, end) and marks (kind, time, number)."""
        self._clock = clock
        self._totals = [0] * len(PHASES)
        self._stack = [OTHER]
        self._since = clock()
        self._marked = self._follows = False
        self._mark = [0] * len(PHASES)
        """Microseconds of each phase at the end of the last update; ``_core_mark`` has those of ``core_wait``."""
        self._core_mark = 0
        self._waited = 0.0
        self._descriptor: int | None = None
        self._closer: weakref.finalize[..., Meter] | None = None

    def waiting(self, phase: int = WAIT_STAGE) -> AbstractContextManager[None]:
        """Return a context for a wait for another worker in that ``phase``, unless a phase of waiting has been entered
        already."""
        return self.spans[phase] if self._stack[-1] < OWN else _NO_SPAN

    def seconds(self, *phases: int) -> float:
        """Return the total seconds in these phases since the meter was made."""
        return sum(self._totals[phase] for phase in phases) / 1e9

    def start(self) -> None:
        """Mark that the time before now belongs to no update."""
        self._marked = False
        self.mark(START)

    def mark(self, what: int, number: int = 0) -> None:
        """Add a mark at the time of the last change of phase."""
        self.kept.append((what, self._since, number))

    def recent(self, updates: int, until: int) -> list[tuple[int, int, int]]:
        """Return the spans and marks of the last ``updates`` updates that had ended by ``until``, and of the time
        between them; any thread may call it."""
        kept = list(self.kept)  # atomic, as long as one thread runs Python at a time
        ends = [index for index, (what, at, _) in enumerate(kept) if what == UPDATE and at <= until]
        return kept[ends[max(0, len(ends) - 1 - updates)] : ends[-1] + 1] if len(ends) > 1 else []

    def update_ended(self, waited: float) -> MeterRow | None:
        """End an update; ``waited`` is the total seconds for which the exchange has waited for replicas so far. Return
        None for the first update after :meth:`start`, which only marks the beginning of the next."""
        self.change()
        totals, more, self._waited = self._totals, waited - self._waited, waited
        if self._marked:
            moved = min(max(0, round(more * 1e9)), totals[EXCHANGE] - 1000 * self._mark[EXCHANGE])
            totals[EXCHANGE] -= moved
            totals[WAIT_GROUP] += moved
        core, mark = self.core_wait() // 1000, [total // 1000 for total in totals]
        row = None
        if self._marked:
            us = tuple(map(sub, mark, self._mark))
            row = MeterRow(us, core - self._core_mark, self._since, self._follows)
        self._follows, self._marked, self._mark, self._core_mark = self._marked, True, mark, core
        return row

    def close(self) -> None:
        """Close the file that the meter reads."""
        if self._closer is not None:
            self._closer()

    def change(self) -> list[int]:
        """Count the time until now for the top phase; return the stack, whose top counts from now on."""
        now = self._clock()
        passed = now - self._since
        if passed > 0:  # else a garbage collection after the clock was read has already counted this time
            phase, since = self._stack[-1], self._since
            self._totals[phase] += passed
            self._since = now  # before any allocation, which may collect garbage
            if phase:
                self.kept.append((phase, since, now))
        return self._stack

    def _core_wait(self) -> int:
        if self._descriptor is None:
            try:
                self._descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            except OSError:  # another system
                self._descriptor = -1
            else:
                self._closer = weakref.finalize(self, os.close, self._descriptor)
        return 0 if self._descriptor < 0 else int(os.pread(self._descriptor, 64, 0).split()[1])


class Traffic:
    """Bytes sent to other replicas; several threads may add to them."""

    def __init__(self, sent: int = 0) -> None:
        self.bytes = sent
        self._lock = threading.Lock()

    def add(self, sent: int) -> None:
        with self._lock:
            self.bytes += sent

    def __reduce__(self) -> tuple[type[Traffic], tuple[int]]:
        return Traffic, (self.bytes,)  # a lock cannot be pickled


class _Local(threading.local):
    meter: Meter | None = None


_local = _Local()


def current() -> Meter:
    """Return this thread's meter."""
    meter = _local.meter
    if meter is None:
        meter = _local.meter = Meter()
    return meter


def phase(number: int) -> Span:
    """Return a context whose time counts for phase ``number``."""
    return (_local.meter or current()).spans[number]


def seconds_without_a_core() -> float:
    """Return the seconds for which this thread has waited for a core so far, as Linux counts them; 0 on other
    systems."""
    return current().core_wait() / 1e9


def _forget() -> None:
    """Drop the meter in a forked process, since its file describes the parent's thread."""
    meter, _local.meter = _local.meter, None
    if meter is not None:
        meter.close()


def count_collections() -> Callable[[], None]:
    """Count full garbage collections, which stop this thread, from now on; return a function that stops counting.

    Python prints and drops what is raised in a callback of its collector. A Ctrl-C that arrives during a collection
    would be raised in the next callback, so it is sent again afterwards.
    """
    meter, thread, get_ident = current(), threading.get_ident(), threading.get_ident

    def collecting(event: str, info: dict[str, int]) -> None:  # a forked child counts on the parent's meter
        if info["generation"] == 2 and get_ident() == thread:
            if event == "start":
                meter.spans[GC].__enter__()
            else:
                meter.spans[GC].__exit__()

    def interrupted(number: int, frame: FrameType | None) -> None:
        inner = frame
        while inner is not None and inner.f_code is not collecting.__code__:
            inner = inner.f_back
        if inner is None:
            interrupt(number, frame)
        else:
            threading.Timer(_AGAIN, signal.pthread_kill, (thread, number)).start()

    def end() -> None:
        gc.callbacks.remove(collecting)
        if in_main_thread and signal.getsignal(signal.SIGINT) is interrupted:
            signal.signal(signal.SIGINT, interrupt)

    handler = signal.getsignal(signal.SIGINT)
    interrupt = handler if callable(handler) else signal.default_int_handler
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and callable(handler):
        signal.signal(signal.SIGINT, interrupted)
    gc.callbacks.append(collecting)
    return end


os.register_at_fork(after_in_child=_forget)
