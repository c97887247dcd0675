"""Leases between workers and scheduler: asked for, lost on their way, and told by workers to another scheduler."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_sdpipe.cli import main
from lightning_sdpipe.dealing.leases import Book, Done, Lease, Segment
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.scheduler.client.reporting import HeardLeases
from lightning_sdpipe.scheduler.log.event_log import read_log
from recipes.harness.late_messages import DelayedLines
from tests.scheduler.live_scheduler import clients, serving
from tests.scheduler.server.test_service import Addressed, Dialogue, line

A, B = Worker(0, 0), Worker(0, 1)
S = Segment(5, 0, 0, 20)


def begin(d: Dialogue, segment: Segment = S) -> list[Lease]:
    """Both pipelines ask for their first lease."""
    for worker in (A, B):
        d.enrol(worker, 7, 0.0)
    return [dealt(d.say(m.AskLease, worker, segment, 0, Done(0))) for worker in (A, B)]


def dealt(replies: list[Addressed]) -> Lease:
    ((_, reply),) = replies
    assert isinstance(reply, m.Dealt)
    return reply.lease


def test_a_lease_is_answered_once_and_for_all() -> None:
    d = Dialogue(NoSync())
    first, second = begin(d)
    assert (first.home, second.home) == (0, 1)
    assert dealt(d.say(m.AskLease, A, S, 0, Done(0))) == first, "the answer may have been lost"
    following = dealt(d.say(m.AskLease, A, S, 1, Done(1, 1.0)))
    assert following.start == 1
    ((_, reply),) = d.say(m.AskLease, A, S, 3, Done(1))
    assert isinstance(reply, e.Refused)
    assert "asked for lease 3 of its pipeline, which was dealt 2" in reply.reason
    ((_, reply),) = d.say(m.AskLease, Worker(0, 2), S, 0, Done(0))
    assert isinstance(reply, e.Refused)


def test_a_worker_that_waits_for_a_lease_hears_of_those_that_others_have_still_to_train() -> None:
    d, segment = Dialogue(NoSync()), Segment(5, 0, 0, 1)
    begin(d, segment)
    assert dealt(d.say(m.AskLease, A, segment, 1, Done(1, 1.0))).size == 0
    assert d.say(m.AskLease, A, segment, 2, Done(1, 1.0)) == []
    assert d.say(m.AskLease, A, segment, 2, Done(1, 1.0)) == [(line(A), e.Waits(d.number, f"it waits for {B}"))]


def train(client: SchedulerClient, segments: list[Segment], got: list[Lease], pause: threading.Barrier) -> None:
    """As a pipeline of one stage would, which takes no time for its batches; pipelines meet between segments."""
    for segment in segments:
        ordinal = trained = 0
        while not got or not got[-1].over or got[-1].segment != segment:
            lease = client.lease(segment, ordinal)
            got.append(lease)
            ordinal, trained = ordinal + 1, trained + lease.size
            client.trained(trained)
        pause.wait()


def each_once(leases: list[Lease], segments: list[Segment], pipelines: int) -> None:
    batches = [(lease.segment, lease.home, number) for lease in leases for number in range(lease.start, lease.stop)]
    every = [(s, home, number) for s in segments for home in range(pipelines) for number in range(s.start, s.stop)]
    assert Counter(batches) == Counter(every)


def test_pipelines_are_dealt_epochs_by_a_live_scheduler(tmp_path: Path) -> None:
    """Its log replays; an answer to a ready that comes meanwhile is not lost."""
    segments = [Segment(5, epoch, start, start + 10) for epoch in range(2) for start in (0, 10)]
    path = tmp_path / "log.jsonl"
    got: list[list[Lease]] = [[], []]
    with (
        serving(AllReduceModels(), 1, 2, log=path) as server,
        clients(server.address, A, B, joins=True) as (a, b),
    ):
        a.ready(0)
        b.ready(0)
        pause = threading.Barrier(2)
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(train, client, segments, got[i], pause) for i, client in enumerate((a, b))]:
                future.result(30)
        assert a.group() == b.group()
    each_once(got[0] + got[1], segments, 2)
    for record in read_log(path):
        assert list(record.differences()) == []
    assert main(["replay", str(path)]) == 0


@pytest.mark.parametrize("repeat_after", [30.0, 0.1])
def test_a_lease_that_comes_between_two_looks_is_kept(monkeypatch: pytest.MonkeyPatch, repeat_after: float) -> None:
    """From a scheduler that is 80 ms away, with looks of 20 ms between rounds, it always comes in a round."""
    monkeypatch.setattr("lightning_sdpipe.scheduler.client.conversation.REPEAT_IN_TRAINING", repeat_after)
    with serving(NoSync(), 1, 1) as server:
        port = int(server.address.rpartition(":")[2])
        lines = DelayedLines("127.0.0.2", [port], 0.08)
        try:
            with clients(f"tcp://127.0.0.2:{port}", A, joins=True) as (a,):
                looks: list[Lease | None] = []
                while len(looks) < 10 and not any(looks):
                    looks.append(a.lease(S, 0, 0.02))
                    a.ready(len(looks))
                    a.group()
                found = looks[-1]
                assert found is not None
                assert found.size == 1
        finally:
            lines.close()


def test_the_length_of_batches_leaves_out_the_start_of_a_loader() -> None:
    now = [10.0]
    heard = HeardLeases(lambda: now[0])
    assert heard.progress() is None
    assert heard.book() is None
    heard.begin(S)

    def trained(at: float, batches: int) -> Done:
        now[0] = at
        heard.trained(batches)
        return heard.done()

    assert heard.done() == Done(0, None, 0.0)
    assert trained(15.0, 1) == Done(1, None, 0.0)
    assert trained(16.0, 2) == Done(2, 1.0, 0.0)
    assert trained(20.0, 4) == Done(4, 1.5, 0.0), "two at once"
    more, empty = Lease(S, 0, 2, 0, 4, 8, 0.0, 2.0), Lease(S, 0, 1, 0, 20, 20, 0.0, 0.0)
    heard.hear(empty)
    now[0] = 30.0
    heard.hear(more)  # it stood still meanwhile
    assert heard.done() == Done(4, 1.5, 0.0)
    assert trained(33.0, 5) == Done(5, 1.5, 0.0)
    assert trained(36.0, 6) == Done(6, 2.0, 0.0)
    heard.begin(S)
    heard.stops = True
    assert heard.book() == Book(S, (empty, more), False, Done(6, 2.0, 0.0, stops=True))
    heard.begin(Segment(5, 0, 20, 30))
    assert heard.book() == Book(Segment(5, 0, 20, 30), (), False, Done(0, 2.0, 0.0))


def told(heard: HeardLeases, now: list[float], *segments: Sequence[float]) -> list[float | None]:
    """Train batches of these lengths; return what is said of the speed as each segment begins, and at the end."""
    said = []
    for number, lengths in enumerate([*segments, ()]):
        heard.begin(Segment(1, number, 0, 10))
        said.append(heard.done().seconds)
        for batches, length in enumerate(lengths, 1):
            now[0] += length
            heard.trained(batches)
    return said


def heard_at() -> tuple[HeardLeases, list[float]]:
    now = [0.0]
    return HeardLeases(lambda: now[0]), now


@pytest.mark.parametrize(
    ("segments", "said"),
    [
        ([(9.0,), (0.5,), (0.5,)], [None, 8.0, None, None]),  # in which the loader begins, or a batch compiles
        ([(9.0, 60.0), (), ()], [None, 60.0, None, None]),  # all others were trained while it stalled
        ([(9.0, 60.0), (), (1.0, 2.0), (0.1, 4.0)], [None, 60.0, None, 2.0, 3.0]),
        ([(1.0, 1.0, 20.0, 1.0), (0.5,), (0.5, 0.4)], [None, 22.0 / 3, None, 0.4]),  # one of each segment is not timed
        ([(0.5, 0.4), (0.5,), (0.5,)], [None, 0.4, 0.4, 0.4]),
    ],
)
def test_a_slow_batch_does_not_keep_a_pipeline_from_all_later_ones(segments: Any, said: Any) -> None:
    assert told(*heard_at(), *segments) == pytest.approx(said)


def test_a_slow_pipeline_is_tried_again_more_and_more_seldom_until_it_holds_its_own() -> None:
    heard, now = heard_at()
    tried, known = [], [60.0]
    for number in range(120):
        heard.begin(Segment(1, number, 0, 10))
        if heard.done().seconds is None:
            tried.append(number)
            now[0] += 61.0
            heard.trained(1)
    assert tried == [0, 2, 5, 10, 19, 36, 69, 102]
    assert told(heard, now, (), known, (0.5, 0.5), (), ())[-1] is None
