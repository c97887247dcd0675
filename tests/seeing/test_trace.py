"""Traces: what they must be for their viewers, and clocks that were set anyhow."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightning_sdpipe import meter
from lightning_sdpipe.cli import main
from lightning_sdpipe.meter import Meter
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.scheduler.client.reporting import SpanReport
from lightning_sdpipe.scheduler.rows import About, SpanChunk
from lightning_sdpipe.seeing.spans import Delivery, read, settle
from lightning_sdpipe.seeing.trace import to_trace
from tests.scheduler.live_scheduler import two_of_this_account

STAGES = 3


def check(trace: dict[str, Any]) -> dict[str, int]:
    """Whether ``trace`` is what the Trace Event Format asks for, and what is in it."""
    assert trace.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    rows: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    arrows: dict[int, dict[str, Any]] = defaultdict(dict)
    beside: dict[str, dict[str, Any]] = defaultdict(dict)
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        where = event["pid"], event["tid"]
        match event["ph"]:
            case "M":
                named.add(where)
                continue
            case "X":
                assert event["dur"] >= 0
                rows[where].append((event["ts"], -event["dur"], event["name"]))
            case "s" | "f" as ph:
                assert event.get("bp") == ("e" if ph == "f" else None)
                assert ph not in arrows[event["id"]]
                arrows[event["id"]][ph] = event
            case "b" | "e" as ph:
                assert ph not in beside[event["id"]]
                beside[event["id"]][ph] = event
            case other:
                raise AssertionError(other)
        assert event["ts"] >= 0
    assert {event["pid"] for event in trace["traceEvents"]} == {pid for pid, _ in rows}
    assert rows.keys() == named, "one process and thread for each worker, and each has a name"
    for row in rows.values():
        open_until: list[float] = []
        for begin, length, name in sorted(row, key=lambda span: span[:2]):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or begin - length <= open_until[-1], f"{name} sticks out of what it is in"
            assert len(open_until) == (0 if name.startswith("update") else 1), name
            open_until.append(begin - length)
    for arrow in arrows.values():
        start, stop = arrow["s"], arrow["f"]
        assert start["ts"] <= stop["ts"]
        assert start["pid"] == stop["pid"], "within a pipeline"
        assert abs(start["tid"] - stop["tid"]) == 1
        for end, phases in ((start, ("forward", "backward")), (stop, ("wait_up", "wait_down"))):
            phase = phases[0 if start["name"] == "activations" else 1]
            spans = rows[end["pid"], end["tid"]]
            assert any(ts <= end["ts"] <= ts - dur and name == phase for ts, dur, name in spans), end
    for each in beside.values():
        assert each["b"]["ts"] <= each["e"]["ts"]
    return {
        "workers": len(rows),
        "updates": sum(n[2].startswith("update") for r in rows.values() for n in r),
        "arrows": len(arrows),
        "beside": len(beside),
    }


class World:
    """Workers of one pipeline, each with a clock of its own; ``true`` is the scheduler's, in nanoseconds."""

    def __init__(self, ahead: Sequence[int], seed: int = 0, drift: float = 0.0) -> None:
        self.draw = random.Random(seed)
        self.ahead, self.drift = ahead, drift
        self.true = [10**12] * len(ahead)
        self.meters = [Meter(lambda stage=stage: self.shows(stage), lambda: 0) for stage in range(len(ahead))]
        self.reports = [SpanReport(lambda stage=stage: self.shows(stage)) for stage in range(len(ahead))]
        self.counts: dict[tuple[int, int], int] = defaultdict(int)

    def shows(self, stage: int) -> int:
        """The clock of that worker."""
        return round(self.true[stage] * (1 + stage * self.drift)) + self.ahead[stage]

    def passes(self, stage: int, phase: int, least: int, most: int) -> None:
        with self.meters[stage].spans[phase]:
            self.true[stage] += self.draw.randint(least, most)

    def mark(self, stage: int, what: int, lane: int) -> None:
        self.counts[stage, lane] += 1
        self.meters[stage].mark(what, self.counts[stage, lane] * meter.LANES + lane)

    def arrives(self, stage: int, phase: int, sent: int, lane: int) -> None:
        """It waits until the message is there, which takes up to 100 µs, or looks later."""
        with self.meters[stage].spans[phase]:
            self.true[stage] = max(self.true[stage], sent) + self.draw.randint(20_000, 100_000)
        self.mark(stage, meter.RECEIVED, lane)

    def update(self, number: int, micro_batches: int = 2) -> None:
        last = len(self.ahead) - 1
        for _ in range(micro_batches):
            for stage in range(last + 1):
                if stage:
                    self.arrives(stage, meter.WAIT_UP, self.true[stage - 1], 2 * stage)
                self.passes(stage, meter.FORWARD, 1_000_000, 5_000_000)
                if stage < last:
                    self.mark(stage, meter.SENT, 2 * stage + 2)
        for _ in range(micro_batches):
            for stage in reversed(range(last + 1)):
                if stage < last:
                    self.arrives(stage, meter.WAIT_DOWN, self.true[stage + 1], 2 * stage + 1)
                self.passes(stage, meter.BACKWARD, 1_000_000, 5_000_000)
                if stage:
                    self.mark(stage, meter.SENT, 2 * stage - 1)
        for it in self.meters:
            it.update_ended(0.0)
            it.mark(meter.UPDATE, number)

    def tell(self, updates: int, latency: tuple[int, int] = (10**6, 10**7)) -> list[SpanChunk]:
        told = []
        for stage, report in enumerate(self.reports):
            report.meter = self.meters[stage]
            asked = self.true[stage]
            self.true[stage] += self.draw.randint(*latency)
            report.want(updates, asked / 1e9, asked / 1e9)
            self.true[stage] += self.draw.randint(0, 10**8)
            spans = report.take()
            assert spans is not None
            assert spans.fault() is None
            came = self.true[stage] + self.draw.randint(*latency)
            told.append(SpanChunk(Worker(stage, 0), 7, came / 1e9, spans))
        return told


@pytest.mark.parametrize("ahead", [(0, 0, 0), (0, 10**9, -(10**9)), (-(10**9), 123_456_789, 3 * 10**14)])
def test_clocks_that_differ_by_seconds_are_put_right(ahead: tuple[int, ...]) -> None:
    for seed in range(20):
        world = World(ahead, seed)
        for number in range(24):
            world.update(number)
        chunks = world.tell(20)
        stories = [read(chunk) for chunk in chunks]
        trace = to_trace(chunks, {})
        assert check(trace) == {"workers": 3, "updates": 60, "arrows": 160, "beside": 0}
        assert trace["otherData"]["clock_slack_us"] == 0
        errors = trace["otherData"]["clock_error_us"]
        assert all(error <= 10_000 for error in errors.values()), "half a beat's way there and back"
        began = [story.updates[0].begin * 1000 - ahead[story.worker.stage] for story in stories]
        shown = [event["ts"] for event in trace["traceEvents"] if event["name"] == "update 4"]
        for stage, (ts, true) in enumerate(zip(shown, began, strict=True)):
            off = abs((ts - shown[0]) - (true - began[0]) / 1e3)
            assert off <= 2 * 100 * stage + 2, "neighbours know each other's clocks better than the scheduler's"


def test_clocks_that_do_not_run_equally_fast_are_allowed_for() -> None:
    world = World((0, 10**9, 0), drift=2e-4)
    for number in range(70):
        world.update(number)
    trace = to_trace(world.tell(64, (0, 1000)), {})
    assert trace["otherData"]["clock_slack_us"] > 0
    check(trace)


def test_bounds_are_as_narrow_as_messages_make_them() -> None:
    a, b = Worker(0, 0), Worker(1, 0)
    messages = [Delivery(None, 0, a, 1000), Delivery(a, 1000, None, 100)]
    assert settle(messages).of[a].ahead == -950
    assert settle(messages).of[a].error == 50
    messages += [Delivery(a, 2000, b, 5010), Delivery(b, 5020, a, 2040)]
    clocks = settle(messages)
    assert clocks.of[a].ahead == -950
    assert (clocks.of[b].ahead, clocks.of[b].error) == (-950 - 2995, 65)
    assert clocks.slack == 0
    assert settle([*messages, Delivery(a, 2000, b, 4970)]).slack > 0, "it came before it could"
    assert settle([]).of == {}
    assert settle([Delivery(a, 0, None, 5)]).of == {}, "the other side is open"


def test_spans_of_a_row_add_up_to_it_and_nothing_of_a_pause_is_shown() -> None:
    world = World((0, 0, 0))
    for number in range(3):
        world.update(number)
    it = world.meters[1]
    it.start()
    world.passes(1, meter.FORWARD, 10**9, 10**9)  # validation
    world.true[1] += 10**6
    it.update_ended(0.0)
    it.mark(meter.UPDATE, 3)
    world.passes(1, meter.DATA, 10**6, 10**6)
    it.kept.append((meter.HIDDEN, world.shows(1) - 5 * 10**5, world.shows(1) - 10**5))
    row = it.update_ended(0.0)
    assert row is not None
    it.mark(meter.UPDATE, 4)
    chunk = world.tell(8)[1]
    story = read(chunk)
    assert [update.number for update in story.updates] == [1, 2, 4]
    for update in story.updates:
        assert sum(piece.end - piece.begin for piece in update.pieces) <= update.end - update.begin
    (piece,) = story.updates[-1].pieces
    assert (piece.phase, piece.end - piece.begin) == (meter.DATA, row.us[meter.DATA])
    found = check(to_trace([chunk], {Worker(1, 0): About("gpu7", "cuda:1", 2)}))
    assert found == {"workers": 1, "updates": 3, "arrows": 0, "beside": 1}


def test_messages_of_another_start_of_a_worker_are_not_taken_for_these() -> None:
    world = World((0, 0, 0))
    for number in range(4):
        world.update(number)
    first, second, third = world.tell(4)
    again = msgspec.structs.replace(second, life=8)
    assert check(to_trace([first, again, third], {}))["arrows"] == 0
    assert check(to_trace([first, second, third], {}))["arrows"] > 0
    assert to_trace([], {})["traceEvents"] == []


def test_a_living_run_is_traced_and_workers_that_are_silent_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_sdpipe.scheduler.server.row_desk.SPANS_WITHIN", 2.0)
    meter.current().kept.clear()  # of other tests of this thread
    path = tmp_path / "trace.json"
    with two_of_this_account() as (server, (one, other)):
        command = ["trace", server.address, "--updates", "3", "-o", str(path)]
        one.join()
        assert main(command) == 2
        assert "has made an update yet" in capsys.readouterr().err
        for iteration in range(6):
            with meter.phase(meter.FORWARD):
                time.sleep(0.001)  # traces have microseconds
            one.step_ended(iteration, 0.0)
        assert main(command) == 0
        assert capsys.readouterr().out.startswith(f"{path}: 3 updates of 1 workers, whose clocks are known to ")
        assert check(json.loads(path.read_text()))["updates"] == 3
        other.join()  # of the same thread, so its spans are the same
        monkeypatch.setattr(one.wire.talk.spans, "want", lambda *_: None)
        assert main(command) == 0
        assert "did not answer in time: workers (stage 0, pipeline 0)" in capsys.readouterr().err
        assert main([*command[:2], "--updates", "65"]) == 2
        assert "at most 64" in capsys.readouterr().err


def test_workers_tell_of_the_same_time_however_late_they_hear_that_it_is_wanted() -> None:
    world = World((0, 10**9, 0))
    for number in range(8):
        world.update(number)
    asked = max(world.true)
    for number in range(8, 12):
        world.update(number)
    for stage, report in enumerate(world.reports):
        report.meter = world.meters[stage]
        report.want(3, asked / 1e9, world.true[stage] / 1e9)
        spans = report.take()
        assert spans is not None
        story = read(SpanChunk(Worker(stage, 0), 7, 0.0, spans))
        assert [update.number for update in story.updates] == [5, 6, 7]
