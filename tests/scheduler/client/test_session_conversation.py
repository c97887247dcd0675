"""What a worker's session says, repeats and believes: a script, and any sequence of replies."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdpipe.dealing.leases import Done, Lease, Segment
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import session_conversation as c
from lightning_sdpipe.scheduler.client.conversation import Connect
from tests.scheduler.client.test_conversation import any_of

ME = Worker(0, 1)
SEGMENT = Segment(0, 0, 0, 9)
PAIR = Group((Worker(0, 0), ME), (0.5, 0.5), 4, "tested")
ANSWER = m.Answer(PAIR, (3, 3))


def conversation(**options: Any) -> c.SessionConversation:
    return c.SessionConversation(ME, 7, clock=lambda: 0.0, **options)


def joined(**options: Any) -> c.SessionConversation:
    talk = conversation(**options)
    number = talk.ask(m.Join).number
    assert talk.hear(m.Acknowledged(number)) == [c.Came(m.Join, m.Acknowledged(number))]
    return talk


def said(effects: list[c.Effect]) -> list[m.Request]:
    return [effect.request for effect in effects if isinstance(effect, c.Send)]


def test_what_is_open_is_repeated_under_new_numbers_and_any_of_them_answers() -> None:
    talk = conversation()
    first = talk.ask(m.Join).number
    (again,) = talk.again()
    assert again.number == first + 1
    assert [type(effect) for effect in talk.hear(m.Acknowledged(first))] == [c.Came]
    assert talk.hear(m.Acknowledged(again.number)) == []
    assert talk.joined
    talk.ask(m.Ready, 3)
    leave = talk.ask(m.Leave)
    assert not talk.joined
    assert talk.again()[0].number == leave.number + 1, "the ready is dropped"
    assert talk.hear(m.Acknowledged(again.number)) == [], "that was to the join"
    assert talk.hear(m.Unknown(again.number)) == [], "a worker that leaves does not join again"
    assert talk.asks(m.Leave)


def test_a_scheduler_that_was_started_again_hears_what_others_may_lack_and_then_what_is_open() -> None:
    talk = joined()
    talk.ask(m.Ready, 3)
    talk.ask(m.AskLease, SEGMENT, 0)
    assert talk.hear(ANSWER) == [c.Came(m.Ready, ANSWER)], "while the lease is waited for"
    talk.ask(m.Ready, 4)
    join, lease, ready = said(talk.hear(m.Unknown(1)))
    assert isinstance(join, m.Join)
    assert (join.resumed, join.heard, join.answers, join.answered) == (True, 4, (ANSWER,), 3)
    assert (lease, ready) == (
        m.AskLease(ME, 7, join.number + 1, SEGMENT, 0, Done(0, None, 0.0)),
        m.Ready(ME, 7, join.number + 2, 4),
    )
    assert [type(request) for request in said(talk.hear(m.Unknown(1), of_beats=True))] == [m.Join]
    refused = m.Refused(join.number, "it serves another mesh")
    assert talk.hear(refused) == [c.Came(m.AskLease, refused), c.Came(m.Ready, refused)], "they depend on the join"
    assert talk.again() == []


def test_what_was_dealt_is_told_when_it_is_asked_for() -> None:
    talk = conversation()
    assert talk.hear(m.AskLeases()) == [], "nothing was"
    talk.ask(m.AskLease, SEGMENT, 0)
    lease = Lease(SEGMENT, 1, 0, 0, 0, 4, 0.0, 1.0)
    assert talk.hear(m.Dealt(msgspec.structs.replace(lease, ordinal=1))) == []
    assert talk.hear(m.Dealt(lease)) == [c.Came(m.AskLease, m.Dealt(lease))]
    (book,) = said(talk.hear(m.AskLeases()))
    assert isinstance(book, m.TellLeases)
    assert (book.segment, book.leases, book.over) == (SEGMENT, (lease,), False)


@pytest.mark.parametrize("host", [None, Worker(0, 0)])
def test_a_scheduler_that_answers_no_heartbeat_is_missed_or_given_up_once(host: Worker | None) -> None:
    talk = joined(host=host)
    for _ in range(c.LAST_BEAT - 1):
        talk.beat()
    talk.hear(m.Pulse(None), of_beats=True)
    effects = [effect for _ in range(2 * c.LAST_BEAT) for effect in talk.beat() if not isinstance(effect, c.Send)]
    if host is None:
        assert effects == [c.Unheard(c.LAST_BEAT)]
    else:
        (ended,) = effects
        assert ended == m.Failure(host, "it ended without a word, and the scheduler with it")


def test_an_invitation_a_line_and_the_end_are_heard_of_once() -> None:
    talk, failure, invitation = joined(), m.Failure(None, "broke"), m.Invitation(PAIR, 3)
    for reply, effect in (
        (invitation, invitation),
        (e.Line(5, b"nonce"), Connect(5, b"nonce")),
        (m.Pulse(failure), failure),
    ):
        assert talk.hear(reply, of_beats=True) == [effect]
        assert talk.hear(reply) == []
    assert talk.hear(m.Abort(m.Failure(ME, "lost its neighbour"))) == []
    assert talk.failure == failure


REPLIES = st.one_of(
    any_of(msgspec.inspect.type_info(kind))
    for kind in (*get_args(m.Reply), e.Line, e.MustEnd)
    if kind is not m.StatusReply
)
LEVELS = (m.Unknown, m.AskLeases, e.MustEnd, e.Line)
"""These are answered, or hold, anew each time; the last line counts."""


@settings(deadline=None)
@given(st.data())
def test_no_sequence_of_replies_breaks_a_session_and_repeated_ones_change_nothing(data: st.DataObject) -> None:
    talk, heard = conversation(host=data.draw(st.sampled_from([None, ME]))), list[m.Reply | e.Reply]()
    asks = st.sampled_from(
        [(m.Hello,), (m.Join,), (m.Leave,), (m.Ready, 1), (m.AskLease, SEGMENT, 0), (m.AskFailure,), (m.AskMissing,)]
    )
    for _ in range(data.draw(st.integers(1, 12))):
        for kind, *fields in data.draw(st.lists(asks, max_size=3)):
            assert m.encode(talk.ask(kind, *fields))
            heard.clear()  # the same reply may answer another question
        reply, of_beats = m.decode_reply(m.encode(data.draw(REPLIES))), data.draw(st.booleans())
        number = talk.make(m.AskFailure).number
        effects = talk.hear(reply, of_beats)
        if getattr(reply, "number", 0) < number and not isinstance(reply, LEVELS):
            heard.append(reply)  # others answer what is not said yet
        before = talk.joined, talk.failure, talk.leases.book(), talk.asks(m.Ready), talk.asks(m.Join, m.Leave)
        for again in heard:
            assert talk.hear(again, of_beats) == []
        after = talk.joined, talk.failure, talk.leases.book(), talk.asks(m.Ready), talk.asks(m.Join, m.Leave)
        assert after == before
        for request in said([*effects, *talk.beat()]) + talk.again():
            assert m.decode_request(m.encode(request)) == request
