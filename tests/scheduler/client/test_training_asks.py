"""What a worker's training thread asks, repeats and believes: a script, and any sequence of replies."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdpipe.dealing.leases import Done, Lease, Segment
from lightning_sdpipe.membership.members import Epoch
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.conversation import LAST_BEAT, Conversation
from lightning_sdpipe.scheduler.client.effects import Came, Connect, Effect, Unheard
from tests.scheduler.client.test_conversation import LINE, any_of

ME = Worker(0, 1)
SEGMENT = Segment(0, 0, 0, 9)
PAIR = Group((Worker(0, 0), ME), (0.5, 0.5), 4, "tested")
ANSWER = m.Answer(PAIR, (3, 3))


def conversation(**options: Any) -> Conversation:
    return Conversation(ME, 7, clock=lambda: 0.0, **options)


def joined(**options: Any) -> Conversation:
    talk = conversation(**options)
    number = talk.training.ask(m.Join).number
    assert talk.hear_training(e.Noted(number)) == [Came(m.Join, e.Noted(number))]
    return talk


def test_what_is_open_is_repeated_under_new_numbers_and_any_of_them_answers() -> None:
    talk = conversation().training
    first = talk.ask(m.Join).number
    (again,) = talk.again()
    assert again.number == first + 1
    assert [type(effect) for effect in talk.hear(e.Noted(first))] == [Came]
    assert talk.hear(e.Noted(again.number)) == []
    assert talk.joined
    talk.ask(m.Ready, 3)
    leave = talk.ask(m.Leave)
    assert not talk.joined
    (again_leave,) = talk.again()
    assert again_leave.number == leave.number + 1, "the ready is not repeated"
    assert talk.hear(e.Noted(again.number)) == [], "that was to the join"
    assert talk.asks(m.Leave)


def test_the_answer_to_a_ready_that_a_leave_withdraws_is_heard_until_the_scheduler_has_noted_that() -> None:
    """It may have been decided before, and its members count on this worker."""
    for comes_first in (True, False):
        talk = joined().training
        talk.ask(m.Ready, 3)
        noted = e.Noted(talk.ask(m.Leave).number)
        replies = [ANSWER, noted] if comes_first else [noted, ANSWER]
        came = [effect for reply in replies for effect in talk.hear(reply)]
        assert came == ([Came(m.Ready, ANSWER), Came(m.Leave, noted)] if comes_first else [Came(m.Leave, noted)])
        assert not talk.asks(m.Ready, m.Leave)


def test_a_scheduler_that_was_started_again_hears_what_others_may_lack() -> None:
    both = joined()
    both.hear(e.Start(Epoch(1, (), "tested"), True))
    both.ask(e.Enrol, {})
    both.training.ask(m.Ready, 3)
    assert both.training.hear(ANSWER) == [Came(m.Ready, ANSWER)]
    both.training.ask(m.Ready, 4)
    for known in (False, True):
        both.hear(e.Stranger(known))
        enrol = both.due(0.0)[0]
        assert isinstance(enrol, e.Enrol)
        assert enrol.resumes is not None
        resumes = enrol.resumes
        assert (resumes.joined, resumes.heard, resumes.answered, resumes.answers) == (True, 4, 3, (ANSWER,))
    both.training.ask(m.Leave)
    both.hear(e.Stranger())
    enrol = both.due(0.0)[0]
    assert isinstance(enrol, e.Enrol)
    assert enrol.resumes is not None
    assert (enrol.resumes.joined, enrol.resumes.heard, enrol.resumes.answers) == (False, 4, ())


def test_what_was_dealt_is_told_to_a_scheduler_that_was_started_again() -> None:
    both = conversation()
    both.hear(e.Start(Epoch(1, (), "tested"), True))
    assert both.training.leases.book() is None, "nothing was"
    both.training.ask(m.AskLease, SEGMENT, 0)
    lease = Lease(SEGMENT, 1, 0, 0, 0, 4, 0.0, 1.0)
    assert both.training.hear(m.Dealt(msgspec.structs.replace(lease, ordinal=1))) == []
    assert both.training.hear(m.Dealt(lease)) == [Came(m.AskLease, m.Dealt(lease))]
    both.ask(e.Enrol, {})
    both.hear(e.Stranger())
    enrol = both.due(0.0)[0]
    assert isinstance(enrol, e.Enrol)
    assert enrol.resumes is not None
    assert enrol.resumes.book == e.Book(SEGMENT, (lease,), False, Done(0, None, 0.0))


@pytest.mark.parametrize("lifeline", [True, False])
@pytest.mark.parametrize("host", [None, Worker(0, 0)])
def test_a_scheduler_that_answers_no_beat_is_missed_or_given_up_once(host: Worker | None, lifeline: bool) -> None:
    """At once if it has closed the lifeline, else when it has been silent for as long as a worker may be."""
    talk, effects = joined(host=host), list[tuple[int, Effect]]()
    talk.hear(e.Now(1, LINE))
    talk.lifeline(there=lifeline)
    for now in range(LAST_BEAT - 1):
        talk.due(float(now))
    talk.hear(e.Noted(3))
    for now in range(20, 20 + 3 * LAST_BEAT):
        talk.due(float(now))
        effects += [(now, effect) for effect in talk.given_up()]
    seconds = LINE.limit if lifeline else LAST_BEAT - 1
    what = (
        "the scheduler that it started has not answered for 30 s: it was stopped, or cannot be reached"
        if lifeline
        else "it ended without a word, and the scheduler with it"
    )
    assert effects == [(20 + seconds, Unheard(seconds) if host is None else e.End(what, True, True, host))]


def test_a_worker_that_slept_hears_what_came_meanwhile_before_it_gives_up_the_scheduler() -> None:
    talk = joined(host=Worker(0, 0))
    talk.hear(e.Now(1, LINE))
    talk.lifeline(there=True)
    for now in (0.0, 100.0):
        talk.due(now)
        assert talk.given_up() == []


def test_an_invitation_a_line_and_the_end_are_heard_of_once_over_either_line() -> None:
    talk, invitation, end = joined(), m.Invitation(PAIR, 3), e.End("broke", True, True, ME)
    for reply, effect in ((invitation, invitation), (e.Now(1, LINE), Connect(5, b"nonce")), (e.Now(0, over=end), end)):
        assert talk.hear(reply) == [effect]
        assert talk.hear(reply) == []
    assert talk.hear_training(e.Now(0, over=e.End("lost its neighbour", True))) == []
    assert talk.stop == end


REPLIES = st.one_of(
    any_of(msgspec.inspect.type_info(kind))
    for kind in (*get_args(m.Reply), *get_args(e.Reply))
    if kind is not m.StatusReply
)


@settings(deadline=None)
@given(st.data())
def test_no_sequence_of_replies_breaks_it_and_repeated_ones_change_nothing(data: st.DataObject) -> None:
    both, heard = conversation(), list[m.Reply | e.Reply]()
    talk = both.training
    asks = st.sampled_from([(m.Hello,), (m.Join,), (m.Leave,), (m.Ready, 1), (m.AskLease, SEGMENT, 0)])
    for now in range(data.draw(st.integers(1, 12))):
        for kind, *fields in data.draw(st.lists(asks, max_size=3)):
            assert m.encode(talk.ask(kind, *fields))
            heard.clear()  # the same reply may answer another question
        reply, number = m.decode_reply(m.encode(data.draw(REPLIES))), both._number
        both.hear_training(reply)
        if getattr(reply, "number", 0) <= number and not isinstance(reply, e.Stranger):
            heard.append(reply)  # others answer what is not said yet
        before = talk.joined, both.stop, talk.leases.book(), talk.asks(m.Ready), talk.asks(m.Join, m.Leave)
        for again in heard:
            assert both.hear_training(again) == []
        after = talk.joined, both.stop, talk.leases.book(), talk.asks(m.Ready), talk.asks(m.Join, m.Leave)
        assert after == before
        for request in [*talk.again(), *both.due(float(now))]:
            assert m.decode_request(m.encode(request)) == request
