"""Rows on their way: how a worker keeps them, what the scheduler takes, and what it gives."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from lightning_sdpipe import meter
from lightning_sdpipe.policies import Worker, registry
from lightning_sdpipe.policies.events import Progress
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler.client.reporting import RowBuffer
from lightning_sdpipe.scheduler.log.event_log import Beginning, EventLog, Updates, read_log
from lightning_sdpipe.scheduler.rows import MOST, About, Chunk, Doing, NewRows, UpdateRow
from lightning_sdpipe.scheduler.server import row_desk
from lightning_sdpipe.scheduler.server.outbox import Outbox
from lightning_sdpipe.scheduler.server.row_desk import RowDesk, RowRing
from tests.scheduler.rows import one_row, rows

A, B = Worker(0, 0), Worker(0, 1)
PHASES = len(meter.PHASES)


def beat(worker: Worker, incarnation: int, told: NewRows) -> e.Beat:
    return e.Beat(worker, incarnation, 1, (), 1, True, joined=True, rows=told)


def of_meter(us: int, ended: int = 0, follows: bool = True) -> meter.MeterRow:
    return meter.MeterRow((us,) + (0,) * (PHASES - 1), us // 10, ended, follows)


def test_a_heartbeat_takes_the_rows_up_to_a_pause_and_says_when_the_last_one_ended() -> None:
    buffer = RowBuffer(clock=lambda: 5_000_000)
    assert buffer.take() is None
    buffer.add(3, of_meter(10, 1_000_000, follows=False))
    buffer.add(4, of_meter(20, 2_000_000))
    buffer.add(9, of_meter(30, 4_000_000, follows=False))
    first, second = buffer.take(), buffer.take()
    assert first is not None
    assert [(row.update, row.us[0], row.core) for row in first.rows] == [(3, 10, 1), (4, 20, 2)]
    assert first.ago == 3000
    assert second is not None
    assert ([row.update for row in second.rows], second.ago) == ([9], 1000)
    assert buffer.take() is None


def test_updates_that_come_faster_share_a_row_and_sums_stay_exact() -> None:
    buffer = RowBuffer(clock=lambda: 0)
    full = [buffer.add(number, of_meter(number, follows=number > 0)) for number in range(MOST)]
    assert full == [False] * (MOST - 1) + [True]
    for number in range(MOST, 1000):
        buffer.add(number, of_meter(number))
    taken = buffer.take()
    assert taken is not None
    assert taken.fault() is None
    assert len(taken.rows) <= MOST
    assert sum(row.count for row in taken.rows) == 1000
    assert sum(row.us[0] for row in taken.rows) == sum(range(1000))
    assert taken.rows[-1].update == 999
    assert taken.dropped == 0


def test_what_cannot_share_a_row_is_dropped_and_counted() -> None:
    buffer = RowBuffer(clock=lambda: 0)
    for number in range(MOST + 5):
        buffer.add(number, of_meter(1, follows=False))
    taken = buffer.take()
    assert taken is not None
    assert (taken.rows[0].update, taken.dropped) == (5, 5)


def test_what_a_policy_hears_is_what_the_rows_add_up_to() -> None:
    new = NewRows((one_row(3, wait_group=100_000, forward=900_000), one_row(5, 3, wait_group=500_000, data=500_000)), 0)
    assert new.progress(A) == Progress(A, 5, 4, 0.5, 0.15)


@pytest.mark.parametrize(
    "wrong",
    [
        NewRows((), 0),
        NewRows(tuple(one_row(number) for number in range(MOST + 1)), 0),
        NewRows((one_row(3), one_row(3)), 0),
        NewRows((one_row(3),), -1),
        NewRows((one_row(3),), 0, -1),
        NewRows((one_row(3, 0),), 0),
        NewRows((one_row(3, forward=-1),), 0),
        NewRows((one_row(3, forward=1 << 60),), 0),
        NewRows((UpdateRow(3, 1, (1, 2), 0),), 0),
        NewRows((UpdateRow(3, 1, (1,) * PHASES, -1),), 0),
        NewRows((UpdateRow(3, 1, (1,) * PHASES, 0, -2),), 0),
    ],
)
def test_rows_that_make_no_sense_are_ignored_and_counted(wrong: NewRows) -> None:
    outbox = Outbox()
    desk = RowDesk(EventLog(), outbox)
    assert desk.hear(beat(A, 1, wrong), True, b"", 0.0) is None
    assert desk.hear(beat(A, 1, rows(3)), False, b"", 0.0) is None, "it has not joined"
    assert outbox.ignored == {"rows": 2}
    assert desk.answer(0, (), 0.0).chunks == ()


def test_the_ring_says_where_it_begins() -> None:
    size = len(msgspec.msgpack.encode(Chunk(A, 1, 0.0, (one_row(0),))))
    ring = RowRing(limit=3 * size)
    for number in range(5):
        ring.add(Chunk(A, 1, float(number), (one_row(number),)))
    first, following, chunks = ring.since(0)
    assert (first, following) == (2, 5)
    assert [msgspec.msgpack.decode(data, type=Chunk).at for data in chunks] == [2.0, 3.0, 4.0]
    assert ring.since(4)[:2] == (4, 5)
    assert ring.since(-2)[:2] == (3, 5)
    assert ring.since(-9)[:2] == (2, 5)
    assert ring.since(5) == ring.since(99) == (5, 5, ())


def test_a_reply_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(msgspec.msgpack.encode(Chunk(A, 1, 0.0, (one_row(0),))))
    monkeypatch.setattr(row_desk, "REPLY_BYTES", 2 * size)
    ring = RowRing()
    for number in range(5):
        ring.add(Chunk(A, 1, 0.0, (one_row(number),)))
    at, pages = 0, []
    while at < 5:
        first, at, chunks = ring.since(at)
        pages.append((first, len(chunks)))
    assert pages == [(0, 2), (2, 2), (4, 1)]


def test_a_row_is_small() -> None:
    typical = UpdateRow(1000, 1, (12_000, 350, 21_000, 42_000, 900, 0, 0, 3_500, 1_200, 300, 40, 4_000, 2_500), 120)
    assert len(msgspec.msgpack.encode(NewRows((typical,) * MOST, 800))) < 45 * MOST


def test_the_log_has_a_line_for_each_chunk_which_replay_skips(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = EventLog(path)
    log.open(Beginning(registry.to_plain(NoSync()), 1, 2, 0.0, "now"))
    desk = RowDesk(log, Outbox())
    desk.introduce(B, About("here", "cpu", 1, 32))
    desk.hear(beat(B, 7, rows(3)), True, b"", 2.0)
    desk.hear(beat(A, 8, rows(4)), True, b"", 3.0)
    log.close()
    (record,) = read_log(path)
    assert [(update.rows.worker, update.rows.life, update.rows.at) for update in record.updates] == [
        (B, 7, 2.0),
        (A, 8, 3.0),
    ]
    assert record.updates[0] == Updates(record.updates[0].rows, About("here", "cpu", 1, 32))
    assert record.events == 0
    assert list(record.differences()) == []


def test_the_log_has_what_workers_do_when_it_changes_and_answers_have_those_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = EventLog(path)
    log.open(Beginning(registry.to_plain(NoSync()), 1, 2, 0.0, "now"))
    desk = RowDesk(log, Outbox())
    training, validating = Doing("training", 0, 3, 60), Doing("validating", 0, 3, 40, (("val_loss", "0.5"),))
    for at, doing in enumerate((None, training, msgspec.structs.replace(training, left=50), validating)):
        desk.note(A, doing, at)
    desk.note(B, training, 9)
    assert desk.answer(0, {A}, 9.0).doing == ((A, validating),)
    log.close()
    lines = path.read_text().splitlines()[1:]
    assert [line.count("training") for line in lines] == [1, 0, 1]
    (record,) = read_log(path)
    assert record.doing == {A: validating, B: training}
