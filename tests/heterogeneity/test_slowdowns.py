"""Slow devices take longer in proportion, recorded speeds are replayed exactly, and files say what was wrong."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import (
    DelayInjector,
    Delays,
    Slowed,
    Static,
    Trace,
    Track,
    read_tracks,
    write_tracks,
)
from lightning_sdpipe.heterogeneity.slowdowns import FIGURE, SHARED_GPUS
from lightning_sdpipe.meter import seconds_without_a_core
from recipes.tools.synthetic import main as synthesise


class Clock:
    """Scripted time, whose sleeps overshoot."""

    def __init__(self, overshoot: float = 0.0, now: float = 100.0) -> None:
        self.now, self.overshoot = now, overshoot

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.overshoot


def injector(heterogeneity: Any, clock: Clock, rank: int = 0) -> DelayInjector:
    return DelayInjector(heterogeneity, 0, 0, rank, sleep=clock.sleep, clock=clock, core_wait=lambda: 0.0)


def compute(worker: DelayInjector, clock: Clock, seconds: float) -> float:
    """How long ``seconds`` of work take."""
    start = clock()
    with worker.computing():
        clock.sleep(seconds)
    return clock() - start


def test_a_static_device_is_slower_by_its_factor() -> None:
    clock = Clock()
    for rank, factor in enumerate((1.0, 2.5, 1.0, 2.5)):  # the factors repeat
        worker = injector(Static([1.0, 2.5]), clock, rank)
        worker.before_forward(7)
        assert compute(worker, clock, 0.2) == pytest.approx(0.2 * factor)
        assert compute(worker, clock, 0.4) == pytest.approx(0.4 * factor)
        assert worker.computed_seconds == pytest.approx(0.6)
        assert worker.injected_seconds == pytest.approx(0.6 * (factor - 1))
        assert set(worker.injected_by_iteration) == ({7} if factor > 1 else set())


def test_a_trace_is_replayed_from_the_first_computation_on(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_tracks(file, "by hand", 2.0, [[1.0, 0.5], [0.25, 1.0]])
    clock = Clock()
    worker = injector(Trace([file], time_scale=0.5), clock)  # one second at full speed, one at half
    clock.sleep(17.3)
    assert compute(worker, clock, 0.8) == pytest.approx(0.8)
    assert compute(worker, clock, 0.5) == pytest.approx(0.2 + 2 * 0.3)
    clock.sleep(0.2)  # waiting for others uses the time up as well: 0.2 s are left at half speed
    assert compute(worker, clock, 0.3) == pytest.approx(0.2 + 0.2)
    assert compute(injector(Trace([file]), clock, rank=1), clock, 0.25) == pytest.approx(1.0)


@given(
    st.lists(st.floats(0.05, 1.0), min_size=1, max_size=5),
    st.floats(0.1, 2.0),
    st.floats(0.0, 20.0),
    st.floats(0.0, 5.0),
    st.floats(0.0, 5.0),
)
def test_the_integral_of_the_speed_is_the_work(
    speeds: list[float], interval: float, since: float, work: float, more: float
) -> None:
    track = Track(interval, tuple(speeds))
    first = track.duration(since, work)
    assert work * (1 - 1e-9) <= first <= work / min(speeds) * (1 + 1e-9)
    both = track.duration(since, work + more)
    assert both == pytest.approx(first + track.duration(since + first, more), rel=1e-6, abs=1e-6)


def test_more_devices_than_tracks_start_elsewhere_in_the_same_ones() -> None:
    trace = Trace(seed=3)
    count = len(read_tracks(SHARED_GPUS))
    starts = {trace.track(rank).start_seconds for rank in range(4 * count)}  # type: ignore[union-attr]
    assert count == 16
    assert len(starts) == 1 + 3 * count  # all of the first begin at 0
    assert trace.track(count).speeds == trace.track(0).speeds  # type: ignore[union-attr]
    assert trace.track(count + 1) == Trace(seed=3).track(count + 1)
    assert trace.track(count + 1) != Trace(seed=4).track(count + 1)


def test_the_shipped_tracks_are_what_the_generator_makes(tmp_path: Path) -> None:
    synthesise(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == SHARED_GPUS.read_text()
    tracks = read_tracks(SHARED_GPUS)
    slowest = [max(1 / track.speeds[second] for track in tracks) for second in range(300)]
    assert 3.0 < sum(slowest) / 300 < 4.0  # "much severer" than condition B, says the paper
    assert len({track.speeds for track in tracks}) == 16


def test_the_tracks_of_the_figure() -> None:
    """Two devices at 0.3 to 0.5, fourteen near 1; a point per 162 s."""
    tracks = read_tracks(FIGURE)
    means = [sum(track.speeds) / len(track.speeds) for track in tracks]
    assert len(tracks) == 16
    assert {track.interval_seconds for track in tracks} == {162.0}
    assert max(means[:2]) < 0.5 < 0.75 < min(means[2:])
    assert Trace(["figure"]).track(3) == tracks[3]
    assert "Figure 10" in json.loads(FIGURE.read_text())["source"]


def test_slower_devices_meet_the_same_delays_and_courses() -> None:
    clock = Clock()
    worker = injector(Slowed(Delays(probability=1.0, seconds=0.3), 4.0), clock)
    worker.before_forward(0)
    assert compute(worker, clock, 0.2) == pytest.approx(0.8)
    assert worker.injected_seconds == pytest.approx(0.3 + 0.6)
    worker = injector(Slowed(Static([1.0, 2.0]), 4.0), clock, rank=1)
    assert compute(worker, clock, 0.2) == pytest.approx(1.6)


@pytest.mark.parametrize(("rank", "seconds"), [(0, 0.2), (1, 0.4), (2, 0.2)])
def test_devices_of_unlike_speeds_are_delayed_too(rank: int, seconds: float) -> None:
    clock = Clock()
    worker = injector(Slowed(Delays(probability=1.0, seconds=0.3), [1.0, 2.0]), clock, rank=rank)
    worker.before_forward(0)
    assert compute(worker, clock, 0.2) == pytest.approx(seconds)
    assert worker.injected_seconds == pytest.approx(0.3 + seconds - 0.2)


def test_a_device_is_waited_for_before_its_work_is_timed() -> None:
    clock = Clock()
    worker = DelayInjector(
        Static([3.0]), 0, 0, settle=lambda: clock.sleep(0.5), sleep=clock.sleep, clock=clock, core_wait=lambda: 0.0
    )
    assert compute(worker, clock, 0.1) == pytest.approx(3 * 0.6)


@pytest.mark.parametrize(("factor", "ends"), [(3.0, 0.4), (5.0, 0.5)])
def test_waiting_for_a_core_is_not_computing(factor: float, ends: float) -> None:
    clock, waited = Clock(), iter((2.0, 2.3))
    worker = DelayInjector(Static([factor]), 0, 0, sleep=clock.sleep, clock=clock, core_wait=lambda: next(waited))
    assert compute(worker, clock, 0.4) == pytest.approx(ends)
    assert worker.computed_seconds == pytest.approx(0.1)


def test_linux_counts_how_long_a_thread_had_no_core() -> None:
    before = seconds_without_a_core()
    time.sleep(0.02)
    assert 0.0 <= seconds_without_a_core() - before < 1.0  # asleep it was not ready


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Static([]), "factors"),
        (lambda: Static([0.5]), "at least 1"),
        (lambda: Static([math.inf]), "factors"),
        (lambda: Slowed(Delays(), 0.9), "factor"),
        (lambda: Slowed(Delays(), [1.0, 0.9]), "at least 1"),
        (lambda: Slowed(Delays(), []), "factor"),
        (lambda: Trace(time_scale=0.0), "time_scale"),
        (lambda: Trace([]), "no track"),
        (lambda: Trace(["/nowhere/trace.json"]), "/nowhere/trace.json cannot be read: No such file"),
        (lambda: Track(1.0, ()), "at least one"),
        (lambda: Track(0.0, (1.0,)), "interval_seconds"),
        (lambda: Track(1.0, (1.0, 0.0)), "Speed 1"),
        (lambda: Track(1.0, (1.1,)), "Speed 0"),
    ],
)
def test_impossible_slowdowns_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "sdpipe-trace/9"}, "sdpipe-trace/9"),
        ({"tracks": [["fast"]]}, "Expected `float`"),
        ({"extra": 1}, "extra"),
        ({"tracks": [[2.0]]}, "Speed 0"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "trace.json"
    write_tracks(file, 'with "quotes"', 1.0, [[1.0]])
    plain = json.loads(file.read_text())
    assert plain["source"] == 'with "quotes"'
    file.write_text(json.dumps(plain | change))
    with pytest.raises(ConfigurationError, match=message):
        read_tracks(file)
