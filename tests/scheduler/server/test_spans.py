"""Spans are asked for in answers to beats, come on beats, and go to all programs that wait for them."""

from __future__ import annotations

import math

import msgspec
import pytest

from lightning_sdpipe.meter import SPANS, UPDATE
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.conversation import SOONEST, Conversation
from lightning_sdpipe.scheduler.rows import SpanChunk, Spans
from lightning_sdpipe.scheduler.server import row_desk
from tests.scheduler.server.test_service import A, Addressed, B, Dialogue, beats

TOLD = Spans(20, 1.0, 5, 6, ((UPDATE, 3, 0), (2, 3, 1), (UPDATE, 1, 1)))


def beat(talk: Dialogue, worker: Worker, spans: Spans | None = None, now: float = 1.0) -> list[Addressed]:
    talk.enrol(worker, 7, now)
    talk.number += 1
    request = e.Beat(worker, 7, talk.number, (), 0, True, joined=True, spans=spans)
    return talk.hear(beats(worker), request, now)


def wants(answer: list[Addressed]) -> tuple[int, float, float] | None:
    (noted,) = [message for _, message in answer if isinstance(message, e.Noted)]
    return noted.wants


def ask(talk: Dialogue, updates: int = 20, peer: bytes = b"viewer", now: float = 1.0) -> list[Addressed]:
    return talk.service.handle(peer, m.Ask("spans", updates), now)


def replies(answer: list[Addressed]) -> list[tuple[bytes, m.SpansReply]]:
    return [(peer, message) for peer, message in answer if isinstance(message, m.SpansReply)]


def test_nothing_is_wanted_unless_a_program_asks() -> None:
    talk = Dialogue(joined=(A, B))
    assert wants(beat(talk, A)) is None
    assert wants(beat(talk, A, TOLD)) is None, "it comes too late"


def test_a_program_hears_of_all_when_the_last_has_told() -> None:
    talk = Dialogue(joined=(A, B))
    assert ask(talk, now=1.0) == []
    assert ask(talk, now=1.1) == [], "it repeats itself"
    assert ask(talk, 8, b"other", now=1.2) == []
    assert wants(beat(talk, A, now=1.5)) == (20, 1.0, 1.5)
    assert wants(beat(talk, A, now=1.6)) == (20, 1.0, 1.6), "the answer may have been lost"
    assert replies(beat(talk, A, TOLD, now=1.7)) == []
    assert wants(beat(talk, A, now=1.8)) is None
    found = replies(beat(talk, B, TOLD, now=2.0))
    assert [peer for peer, _ in found] == [b"viewer", b"other"]
    for _, reply in found:
        chunks = [msgspec.msgpack.decode(data, type=SpanChunk) for data in reply.chunks]
        assert chunks == [SpanChunk(A, 7, 1.7, TOLD), SpanChunk(B, 7, 2.0, TOLD)]
        assert (reply.missing, reply.left_out) == ((), ())
    assert wants(beat(talk, B, now=2.1)) is None


def test_fewer_updates_than_a_program_wants_do_not_answer_it() -> None:
    talk = Dialogue(joined=(A, B))
    ask(talk, 20)
    beat(talk, A)
    ask(talk, 64, b"other")
    assert wants(beat(talk, A, TOLD)) == (64, 1.0, 1.0)


def test_workers_that_do_not_tell_in_time_are_named() -> None:
    talk = Dialogue(joined=(A, B))
    ask(talk, now=1.0)
    beat(talk, B, TOLD, now=1.5)
    assert talk.service.deadline() <= 1.0 + row_desk.SPANS_WITHIN
    assert replies(talk.service.tick(1.0 + row_desk.SPANS_WITHIN - 0.1)) == []
    ((_, reply),) = replies(talk.service.tick(1.0 + row_desk.SPANS_WITHIN))
    assert (len(reply.chunks), reply.missing) == (1, (A,))
    ((_, reply),) = replies(ask(Dialogue()))
    assert (reply.chunks, reply.missing) == ((), ()), "no worker is there"


def test_a_reply_has_a_size_and_programs_that_wait_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Dialogue(joined=(A, B))
    monkeypatch.setattr(row_desk, "SPANS_REPLY_BYTES", 50)
    ask(talk)
    beat(talk, A, TOLD)
    ((_, reply),) = replies(beat(talk, B, TOLD))
    assert (len(reply.chunks), reply.left_out) == (1, (B,))
    for number in range(row_desk.MOST_ASKING):
        assert replies(ask(talk, peer=b"%d" % number)) == []
    assert [peer for peer, _ in replies(ask(talk, peer=b"more"))] == [b"0"]


@pytest.mark.parametrize(
    "spans",
    [
        Spans(20, 1.0, 7, 6, ()),
        Spans(20, math.nan, 5, 6, ()),
        Spans(20, 1.0, 5, 6, ((13, 3, 1),)),
        Spans(20, 1.0, 5, 6, ((-6, 3, 1),)),
        Spans(20, 1.0, 5, 6, ((2, 1, 3),)),
        Spans(20, 1.0, 5, 6, ((2, -1, -1),)),
        Spans(20, 1.0, 5, 6, ((UPDATE, 3, 1),) * (SPANS + 1)),
    ],
)
def test_spans_that_make_no_sense_are_ignored_and_the_beat_holds(spans: Spans) -> None:
    talk = Dialogue(joined=(A, B))
    ask(talk)
    assert wants(beat(talk, A, spans)) == (20, 1.0, 1.0)
    assert talk.service.refused["spans"] == 1


def test_a_worker_tells_soon_and_once() -> None:
    talk = Conversation(A, 7)
    (before,) = talk.due(0.0)
    talk.hear(e.Noted(before.number))
    talk.hear(e.Noted(before.number, wants=(5, 0.5, 1.0)))
    assert talk.deadline == SOONEST
    (told,) = talk.due(SOONEST)
    assert isinstance(told, e.Beat)
    assert told.spans is not None
    assert (told.spans.updates, told.spans.asked, told.spans.kept) == (5, 1.0, ())
    assert told.spans.heard <= told.spans.said
    for now, asked in ((5.0, math.nan), (6.0, math.inf)):
        talk.hear(e.Noted(told.number, wants=(5, 0.0, asked)))
        assert isinstance(talk.due(now)[0], e.Beat)
    (after,) = talk.due(10.0)
    assert isinstance(after, e.Beat)
    assert after.spans is None
