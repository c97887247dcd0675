"""One phase at a time: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

from lightning_sdpipe import meter
from lightning_sdpipe.meter import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    GC,
    INJECTED,
    OPTIMIZER,
    OTHER,
    PHASES,
    WAIT_GROUP,
    WAIT_STAGE,
    WAIT_UP,
    Meter,
    MeterRow,
)


class Clock:
    """Of nanoseconds, set in microseconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> int:
        return round(1000 * self.now)


def metered() -> tuple[Meter, Clock, Clock]:
    clock, core = Clock(), Clock()
    return Meter(clock, core), clock, core


def phases(row: MeterRow | None) -> dict[str, int]:
    assert row is not None
    return {name: us for name, us in zip(PHASES, row.us, strict=True) if us}


def test_time_counts_for_the_innermost_phase() -> None:
    it, clock, _ = metered()
    it.update_ended(0.0)
    with it.spans[FORWARD]:
        clock.now = 3
        with it.spans[INJECTED]:
            clock.now = 5
        clock.now = 9
    assert phases(it.update_ended(0.0)) == {"forward": 7, "injected": 2}


def test_phases_add_up_to_the_time_from_update_to_update() -> None:
    it, clock, core = metered()
    assert it.update_ended(0.0) is None, "there was no update before"
    rows, step = [], 0.7  # less than the whole microseconds of a row
    for number in range(1, 40):
        for phase in (FORWARD, BACKWARD, OPTIMIZER, WAIT_UP):
            clock.now += step
            with it.spans[phase]:
                clock.now += step * phase
        core.now += 0.25
        rows.append(it.update_ended(0.0))
        total = sum(sum(row.us) for row in rows if row is not None)
        assert 0 <= clock() - 1000 * total < 1000 * len(PHASES), "what is cut off a row is in the next one"
        assert rows[-1] is not None
        assert rows[-1].follows == (number > 1)
        assert rows[-1].ended == clock()
    assert sum(row.core for row in rows if row is not None) == 9


def test_a_pause_is_in_no_row() -> None:
    it, clock, _ = metered()
    for _ in range(2):
        clock.now += 10
        it.update_ended(0.0)
    clock.now += 1000
    it.start()
    clock.now += 500
    assert it.update_ended(0.0) is None
    clock.now += 20
    row = it.update_ended(0.0)
    assert phases(row) == {"other": 20}
    assert row is not None
    assert not row.follows


def test_what_the_exchange_has_waited_is_no_exchange() -> None:
    it, clock, _ = metered()
    it.update_ended(7.0)
    with it.spans[EXCHANGE], it.waiting():  # whose wait it is, it says itself
        clock.now += 50
    assert phases(it.update_ended(7.0 + 30e-6)) == {"wait_group": 30, "exchange": 20}
    with it.spans[EXCHANGE]:
        clock.now += 5
    assert phases(it.update_ended(8.0)) == {"wait_group": 5}, "the rest of it passed in another thread"
    with it.spans[EXCHANGE]:
        clock.now += 5
    assert phases(it.update_ended(0.0)) == {"exchange": 5}, "another run began to count"


def test_a_wait_that_no_span_names_is_for_a_stage() -> None:
    it, clock, _ = metered()
    it.update_ended(0.0)
    for outer in (OTHER, BACKWARD, WAIT_UP, WAIT_GROUP):
        with it.spans[outer], it.waiting():
            clock.now += 1
    assert phases(it.update_ended(0.0)) == {"wait_up": 1, "wait_stage": 2, "wait_group": 1}
    assert it.seconds(WAIT_UP, WAIT_STAGE) == 3e-6


def test_a_full_collection_counts_for_the_thread_that_it_stops() -> None:
    gc.collect()
    seen: list[float] = []

    def collect() -> None:
        before = meter.current().seconds(GC)
        gc.collect()
        seen.append(meter.current().seconds(GC) - before)

    end = meter.count_collections()
    thread = threading.Thread(target=collect)
    thread.start()
    thread.join()
    assert seen == [0.0], "of another thread"
    collect()
    assert seen[1] > 0
    here = meter.current().seconds(GC)
    gc.collect(0)
    assert meter.current().seconds(GC) == here, "a small one is not worth a span"
    end()
    collect()
    assert seen[2] == 0.0


def test_an_interrupt_that_comes_during_a_collection_is_raised_behind_it() -> None:
    """Python drops what is raised within a callback of its collector. In a process whose heap is small and its own."""
    code = """
import gc, signal, threading
from lightning_sdpipe import meter

def look():
    it._clock = meter.CLOCK
    signal.raise_signal(signal.SIGINT)
    return meter.CLOCK()

it = meter.current()
end = meter.count_collections()
it._clock = look
try:
    gc.collect()
    threading.Event().wait()
except KeyboardInterrupt:
    end()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("raised")
"""
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout == "raised\n"


def test_nothing_is_installed_by_an_import() -> None:
    code = """
import gc, signal
import lightning_sdpipe.meter, lightning_sdpipe.cli, lightning_sdpipe.simulate.command
assert gc.callbacks == []
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_collection_behind_the_look_at_the_clock_counts_once() -> None:
    it, clock, _ = metered()
    it.update_ended(0.0)
    late = iter([4, 1])  # the clock was looked at, at 1, and garbage was collected until 4 before that was counted

    def look() -> int:
        clock.now = next(late)
        return clock()

    with it.spans[GC]:
        clock.now = 3
    it._clock = look
    it.change()
    it.change()
    it._clock = clock
    clock.now = 6
    assert phases(it.update_ended(0.0)) == {"other": 3, "gc": 3}


def test_a_forked_process_has_a_meter_of_its_own() -> None:
    mine = meter.current()
    mine.core_wait()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, b"other" if meter.current() is not mine else b"same")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 9) == b"other"
    os.close(read)
    os.close(write)
    assert meter.current() is mine
    assert mine.core_wait() >= 0, "what the child has closed was its own"
