"""What a worker's process says, repeats and believes: scripted times, and any sequence of replies."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdpipe.dealing.leases import Book, Done, Lease, Segment
from lightning_sdpipe.membership.members import FIXED, Epoch, Member, Met, Receive
from lightning_sdpipe.meter import PHASES, MeterRow
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import conversation as c
from lightning_sdpipe.scheduler.protocol import decode_reply, decode_request, encode

ME = Worker(0, 1)
EPOCH = Epoch(3, (Member(1, 7),), "tested")
LINE = e.Line(5, b"nonce", 1.0, 30.0)
PAIR = Group((Worker(0, 0), ME), (0.5, 0.5), 4, "tested", epoch=3)
ANSWER = m.Answer(PAIR, (3, 3))
SEGMENT = Segment(0, 0, 0, 9)


def kinds(requests: list[e.Request | m.Request]) -> list[str]:
    return [type(request).__name__ for request in requests]


def enrolling() -> c.Conversation:
    """Of a process that has said so, at 0."""
    talk = c.Conversation(ME, 7)
    talk.ask(e.Enrol, {"model": "linear"})
    talk.due(0.0)
    return talk


def enrolled() -> c.Conversation:
    """Of a member that has said what there was to say, at 0."""
    talk = enrolling()
    talk.hear(e.Start(EPOCH, True))
    return talk


def test_a_request_is_repeated_until_it_is_answered_and_beats_go_on() -> None:
    talk = c.Conversation(ME, 7)
    key = talk.ask(e.Meet, "pause/1", b"")
    assert kinds(talk.due(0.0)) == ["Beat", "Meet"]
    assert talk.deadline == c.FIRST_BEAT
    assert kinds(talk.due(c.FIRST_BEAT)) == ["Beat"]
    assert kinds(talk.due(0.5)) == ["Beat", "Meet"]
    talk.hear(e.Waits(1, "it waits for pipeline 0"))
    met = e.HasMet(Met(0, "pause/1", (0, 1), (b"", b""), 0))
    assert talk.hear(met) == [c.Replied(key, met)]
    assert talk.hear(met) == [], "it was answered"
    assert kinds(talk.due(1.0)) == ["Beat"]


def test_a_newcomer_tells_a_new_scheduler_of_the_members_that_it_was_to_join() -> None:
    """And gives its state later: a scheduler before may have given a transfer the name that this one gives it."""
    talk = enrolling()
    talk.hear(e.Waits(1, "pipeline 2 finds a donor", EPOCH))
    for life in (1, 2):
        talk.hear(e.Stranger(life=life))
        assert [said.heard_of for said in talk.due(life) if isinstance(said, e.Enrol)] == [EPOCH] * 2
        talk.hear(e.Now(life << e.LIFE, donate=("state-2-1",)))
    assert talk.donations == ("state-2-1",)


def test_a_beat_says_at_once_what_others_wait_for() -> None:
    talk = enrolled()
    talk.holds([4, 3])
    talk.misses(3, [5])
    (beat,) = talk.due(0.01)
    assert isinstance(beat, e.Beat)
    assert (beat.holds, beat.epoch, beat.enrolled, beat.misses) == ((3, 4), 3, True, (5,))
    talk.hear(e.Now(1, epoch=Epoch(4, (Member(1, 7),), "another")))
    (beat,) = talk.due(5.0)
    assert isinstance(beat, e.Beat)
    assert (beat.epoch, beat.misses) == (4, ()), "who is missed in an epoch is said of that one"
    assert beat.seen == 1


def test_a_scheduler_that_is_away_is_looked_for_and_hears_first_who_this_is() -> None:
    talk = enrolled()
    assert talk.hear(e.Now(9, LINE)) == [c.Connect(5, b"nonce")]
    assert talk.hear(e.Now(9, LINE)) == []
    talk.hear(e.Now(10, donate=("state-2-1",)))
    talk.lifeline(there=True)
    talk.due(1.0)
    assert talk.deadline == 2.0
    talk.lifeline(there=False)
    talk.due(1.1)
    assert talk.deadline == pytest.approx(1.1 + c.PROBE)
    talk.tell(e.Publish, "newest.ckpt", 4, True)
    talk.tell(e.Publish, "last.ckpt", 8, True)
    talk.tell(e.Store, "put", ("cut/kept",), b"[3, 3]")
    talk.ask(e.Meet, "pause/1", b"")
    talk.hear(e.Stranger())
    assert talk.deadline < 0
    enrol, *others = talk.due(1.11)
    assert isinstance(enrol, e.Enrol)
    assert (enrol.resumes, enrol.fingerprint) == (e.Resumes(EPOCH, ()), {"model": "linear"})
    assert sorted(kinds(others)) == ["Meet", "Publish", "Store"], "what was told to the one before is not for this one"
    talk.hear(e.Now(10, donate=("state-2-1",)))
    assert talk.donations == (), "which the one before had asked for"
    another = msgspec.structs.replace(LINE, nonce=b"other")
    assert talk.hear(e.Now(5 << e.LIFE, another, hold="too few")) == [c.Connect(5, b"other")]
    assert talk.held_up == "too few"
    assert talk.hear(e.Now(11, LINE, hold="")) == [], "that was of the one before"
    assert talk.held_up == "too few"


def test_a_strangers_word_that_comes_after_it_was_let_in_is_over() -> None:
    """Else it would drop what that scheduler has asked it for since."""
    talk = enrolled()
    talk.hear(e.Now(5 << e.LIFE, LINE, donate=("state-2-1",)))
    talk.hear(e.Stranger(life=5))
    assert "Enrol" not in kinds(talk.due(1.0))
    assert talk.donations == ("state-2-1",)
    talk.hear(e.Stranger(life=6))
    assert "Enrol" in kinds(talk.due(1.1)), "another scheduler does not know it"
    assert talk.donations == ()


def test_a_process_that_was_let_in_meanwhile_does_not_come_back() -> None:
    """Its beat was there before its enrolment, and so is the answer."""
    talk = enrolling()
    talk.hear(e.Stranger())
    talk.hear(e.Start(EPOCH, True))
    assert talk.due(0.01) == []
    talk.hear(e.Stranger())
    assert kinds(talk.due(0.02)) == ["Enrol"], "a later word counts"


def test_what_is_true_now_is_not_undone_by_what_was_overtaken() -> None:
    talk = enrolled()
    assert talk.hear(e.Now(5, hold="too few")) == []
    assert talk.hear(e.Now(4, epoch=(later := Epoch(4, (), "another")), hold="")) == [c.EpochBegan(later)]
    assert (talk.held_up, talk.epoch) == ("too few", later), "an epoch counts by its own number"
    assert talk.hear(e.Now(6)) == []
    assert talk.held_up == "too few", "it is not decided yet"
    talk.hear(e.Now(7, hold=""))
    assert talk.held_up == ""


def test_stage_zero_alone_copies_and_once_however_late_it_is_told() -> None:
    talk, other = enrolled(), c.Conversation(Worker(1, 1), 7)
    other.hear(e.Now(1, donate=("state-2-1",)))
    assert other.donations == ()
    talk.hear(e.Now(1, donate=("state-2-1", "state-0-2")))
    assert talk.donations == ("state-2-1", "state-0-2")
    key = talk.ask(e.TellSnapshot, "state-2-1", 27)
    assert talk.donations == ("state-0-2",)
    talk.hear(e.Now(2, donate=("state-2-1",)))
    assert talk.donations == (), "one it has copied, and none waits for the other any more"
    number = talk.due(1.0)[-1].number
    assert talk.hear(e.Noted(number)) == [c.Replied(key, e.Noted(number))]


def test_an_answer_to_an_earlier_question_is_none_to_a_later_one() -> None:
    talk = c.Conversation(ME, 7)
    first, second = (e.Get(Receive(1, 0, f"state-1-{number}", 5)) for number in (1, 2))
    key = talk.ask(e.Enrol, {})
    assert talk.hear(first) == [c.Replied(key, first)]
    key = talk.ask(e.TellReceived, "state-1-1", -1, "reset")
    assert talk.hear(first) == []
    assert talk.hear(second) == [c.Replied(key, second)]


def test_an_exchange_that_is_stuck_is_broken_off_again_and_again() -> None:
    talk = enrolled()
    assert talk.hear(e.Now(2, stuck=(5,))) == [c.GroupBroke(5)]
    assert talk.hear(e.Now(3, stuck=(5,))) == [c.GroupBroke(5)], "it may have begun that exchange since"


def test_beats_and_a_leave_say_what_the_model_contains() -> None:
    talk = enrolled()
    talk.contains = 7
    (beat,) = (said for said in talk.due(math.inf) if isinstance(said, e.Beat))
    talk.ask(m.Leave)
    (leave,) = talk.due_in_training(0.0)
    assert isinstance(leave, m.Leave)
    assert (beat.contains, leave.contains) == (7, 7)


def test_a_newcomer_knows_that_its_donor_is_another_one_by_now_though_it_still_waits_for_the_first() -> None:
    talk = enrolling()
    first, second = (Receive(1, donor, f"state-1-{donor}", 4) for donor in (2, 3))
    assert [type(effect) for effect in talk.hear(e.Get(first))] == [c.Replied]
    assert (talk.offered, talk.hear(e.Get(second)), talk.offered) == ("state-1-2", [], "state-1-3")


@pytest.mark.parametrize(
    "ends", [e.Start(EPOCH, True, "newest.ckpt"), e.Now(9, over=e.End("all are lost", True, True))]
)
def test_a_newcomer_knows_that_no_donor_is_left(ends: m.Reply | e.Reply) -> None:
    """It would wait for the first one as long as a part of a state may take."""
    talk = enrolling()
    talk.hear(e.Get(Receive(1, 2, "state-1-2", 4)))
    talk.hear(ends)
    assert talk.offered != "state-1-2"


def test_what_is_refused_is_not_asked_again_and_the_end_ends_all_but_a_departure() -> None:
    talk = enrolled()
    put, meet = talk.ask(e.Store, "put", ("a/b",)), talk.ask(e.Meet, "pause", b"")
    with pytest.raises(AssertionError, match=r"another thread asks for \('meet', 'pause'\), too"):
        talk.ask(e.Meet, "pause", b"")
    refused = e.Refused(talk.due(0.1)[0].number, "too large")
    assert talk.hear(refused) == [c.Replied(put, refused)]
    assert talk.hear(e.Refused(0, "different places")) == [c.Replied(meet, e.Refused(0, "different places"))]
    talk.ask(e.Meet, "other", b"")
    assert talk.hear(e.must_end("lost")) == [e.End("lost", run=False)]
    assert talk.hear(e.Now(8, over=e.End("all have finished", True, False))) == [], "the first end counts"
    talk.hear(e.Stranger())
    talk.ask(e.Meet, "more", b"")
    talk.ask(e.Depart, False)
    assert kinds(talk.due(0.2)) == ["Depart"]


# ------------------------------------------------------------------------------- the thread that trains


def conversation(**options: Any) -> c.Conversation:
    return c.Conversation(ME, 7, clock=lambda: 0.0, **options)


def joined(**options: Any) -> c.Conversation:
    talk = conversation(**options)
    noted = e.Noted(ask(talk, m.Join).number)
    assert talk.hear(noted) == [c.Replied(m.Join, noted)]
    return talk


def ask(talk: c.Conversation, kind: c.Kind, *fields: object) -> m.Request:
    """What the thread that trains then says."""
    talk.ask(kind, *fields)
    (request,) = talk.due_in_training(0.0)
    return request


def returns(talk: c.Conversation, now: float) -> e.Resumes:
    """What a process says of itself to a scheduler that does not know it."""
    enrol = next(request for request in talk.due(now) if isinstance(request, e.Enrol))
    assert enrol.resumes is not None
    return enrol.resumes


def test_what_is_open_is_repeated_under_new_numbers_and_any_of_them_answers() -> None:
    talk = conversation()
    first = ask(talk, m.Join).number
    (again,) = talk.due_in_training(math.inf)
    assert again.number == first + 1
    assert [type(effect) for effect in talk.hear(e.Noted(first))] == [c.Replied]
    assert talk.hear(e.Noted(again.number)) == []
    assert talk.joined
    ask(talk, m.Ready, 3)
    leave = ask(talk, m.Leave)
    assert not talk.joined
    (again_leave,) = talk.due_in_training(math.inf)
    assert again_leave.number == leave.number + 1, "the ready is not repeated"
    assert talk.hear(e.Noted(again.number)) == [], "that was to the join"
    assert m.Leave in talk._open


def test_the_answer_to_a_ready_that_a_leave_withdraws_is_heard_until_the_scheduler_has_noted_that() -> None:
    """It may have been decided before, and its members count on this worker."""
    for comes_first in (True, False):
        talk = joined()
        ask(talk, m.Ready, 3)
        noted = e.Noted(ask(talk, m.Leave).number)
        replies = [ANSWER, noted] if comes_first else [noted, ANSWER]
        came = [effect for reply in replies for effect in talk.hear(reply)]
        assert came == (
            [c.Replied(m.Ready, ANSWER), c.Replied(m.Leave, noted)] if comes_first else [c.Replied(m.Leave, noted)]
        )
        assert not {m.Ready, m.Leave} & talk._open.keys()


def test_a_scheduler_that_was_started_again_hears_up_to_which_group_this_worker_has_heard() -> None:
    both = joined()
    both.hear(e.Start(Epoch(1, (), "tested"), True))
    both.ask(e.Enrol, {})
    ask(both, m.Ready, 3)
    assert both.hear(ANSWER) == [c.Replied(m.Ready, ANSWER)]
    ask(both, m.Ready, 4)
    for known in (False, True):
        both.hear(e.Stranger(known))
        resumes = returns(both, 0.0)
        assert (resumes.joined, resumes.heard, resumes.answered) == (True, 4, 3)
    ask(both, m.Leave)
    both.hear(e.Stranger())
    resumes = returns(both, 0.0)
    assert (resumes.joined, resumes.heard, resumes.answered) == (False, 4, None)


def test_a_group_of_an_earlier_scheduler_that_is_read_too_late_to_be_told_does_not_count() -> None:
    """The new one gives another group for the same ready, perhaps of the same number."""
    talk = joined()
    talk.ask(e.Enrol, {"model": "linear"})
    talk.hear(e.Start(EPOCH, True))
    ask(talk, m.Ready, 3)
    talk.hear(e.Stranger(life=8))
    resumes = returns(talk, 0.1)
    assert resumes.heard == talk.earlier == -1
    assert talk.hear(msgspec.structs.replace(ANSWER, life=5)) == []
    new = msgspec.structs.replace(ANSWER, life=8)
    assert talk.hear(new) == [c.Replied(m.Ready, new)]
    talk.hear(e.Stranger(life=9))
    talk.due(0.2)
    assert talk.earlier == new.group.sequence
    for life in (9, 10):
        talk.hear(e.Now(life << e.LIFE | 1))
    assert [life for life in (8, 9, 10) if talk.is_over(life)] == [9]
    talk.hear(e.Stranger(life=9))
    assert talk.due(0.2) == [], "an earlier one has said so, late"
    ask(talk, m.Ready, 4)
    newest = m.Answer(PAIR, (4, 4), life=10)
    assert talk.hear(newest) == [c.Replied(m.Ready, newest)]


def test_what_was_dealt_is_told_to_a_scheduler_that_was_started_again() -> None:
    both = conversation()
    both.hear(e.Start(Epoch(1, (), "tested"), True))
    assert both.leases.book() is None, "nothing was"
    number = ask(both, m.AskLease, SEGMENT, 0).number
    lease = Lease(SEGMENT, 1, 0, 0, 0, 4, 0.0, 1.0)
    assert both.hear(m.Dealt(msgspec.structs.replace(lease, ordinal=1), number)) == []
    assert both.hear(m.Dealt(lease, number)) == [c.Replied(m.AskLease, m.Dealt(lease, number))]
    both.ask(e.Enrol, {})
    both.hear(e.Stranger())
    resumes = returns(both, 0.0)
    assert resumes.book == Book(SEGMENT, (lease,), False, Done(0, None, 0.0))


def test_a_lease_of_an_earlier_scheduler_that_is_read_too_late_to_be_told_does_not_count() -> None:
    """The new one deals these batches again, perhaps to another pipeline."""
    talk = enrolled()
    early, again = ask(talk, m.AskLease, SEGMENT, 0), Lease(SEGMENT, 1, 0, 0, 0, 2, 0.0, 1.0)
    talk.hear(e.Stranger())
    resumes = returns(talk, 0.1)
    assert resumes.book == Book(SEGMENT, (), False, resumes.book.done if resumes.book else Done(0))
    assert talk.hear(m.Dealt(msgspec.structs.replace(again, stop=4), early.number)) == []
    (asked,) = talk.due_in_training(0.1)
    assert talk.hear(m.Dealt(again, asked.number)) == [c.Replied(m.AskLease, m.Dealt(again, asked.number))]


ENDED, UNHEARD = "ended without a word", "has not answered for 30 s: it was stopped, or cannot be reached"
SURVIVES = (
    "an ordinary run ends with its scheduler, an elastic one survives it (start it by `sdpipe run --pipelines N "
    "--stages M SCRIPT`)"
)


@pytest.mark.parametrize("lifeline", [True, False])
@pytest.mark.parametrize("host", [None, ME, Worker(0, 0)])
@pytest.mark.parametrize("elastic", [False, True])
def test_a_scheduler_that_answers_no_beat_is_missed_or_given_up_once(
    host: Worker | None, lifeline: bool, elastic: bool
) -> None:
    """At once if it has closed the lifeline, else when it has been silent for as long as a worker may be."""
    talk, effects = joined(host=host), list[tuple[int, c.Effect]]()
    talk.ask(e.Enrol, {"model": "linear"} if elastic else FIXED)
    talk.due(0.0)
    talk.hear(e.Start(EPOCH, True))
    talk.hear(e.Now(1, LINE))
    talk.lifeline(there=lifeline)
    for now in range(c.LAST_BEAT - 1):
        talk.due(float(now))
    talk.hear(e.Noted(3))
    for now in range(20, 20 + 3 * c.LAST_BEAT):
        talk.due(float(now))
        effects += [(now, effect) for effect in talk.given_up()]
    seconds = LINE.limit if lifeline else c.LAST_BEAT - 1
    its = "its process, or that of the scheduler that it started," if host == Worker(0, 0) else "its process"
    end = e.End(f"{its} {UNHEARD if lifeline else ENDED}; {SURVIVES}", True, True, None if host == ME else host)
    unheard = (
        f"worker {ME}: the scheduler has not answered for {seconds:.0f} s; a worker that needs a group waits for it, "
        "and it can be started again at the same address"
    )
    assert effects == [(20 + seconds, c.Warned(unheard) if elastic else end)]


@pytest.mark.parametrize("elastic", [False, True])
def test_an_ordinary_run_ends_when_its_scheduler_was_started_again(elastic: bool) -> None:
    talk = c.Conversation(ME, 7, (2, 3))
    talk.ask(e.Enrol, {"model": "linear"} if elastic else FIXED)
    assert talk.hear(e.Stranger(life=8)) == [], "it has not begun"
    assert kinds(talk.due(0.0)) == ["Enrol", "Beat", "Enrol"]
    talk.hear(e.Start(EPOCH, True))
    ask(talk, m.Ready, 3, None)
    assert talk.hear(ANSWER) == [c.Replied(m.Ready, ANSWER)], "answers of an ordinary run name no scheduler"
    ends = [effect for effect in talk.hear(e.Stranger(life=9)) if isinstance(effect, e.End)]
    assert bool(ends) is not elastic
    if ends:
        assert (ends[0].run, ends[0].failed, ends[0].worker) == (True, True, None)
        assert "it was started again" in ends[0].reason
        assert "sdpipe run --pipelines 3 --stages 2 SCRIPT" in ends[0].reason


def test_a_worker_that_has_said_that_it_failed_still_names_the_machine_of_the_scheduler() -> None:
    talk = c.Conversation(ME, 7, host=Worker(0, 0))
    talk.ask(e.Enrol, FIXED)
    talk.due(0.0)
    talk.hear(e.Start(EPOCH, True))
    talk.hear(e.Now(1, LINE))
    talk.lifeline(there=True)
    talk.ask(e.Depart, False, "RuntimeError: Connection closed by peer")
    talk.lifeline(there=False)
    ends: list[c.Effect] = []
    for now in range(2 * c.LAST_BEAT):
        talk.due(float(now))
        ends += talk.given_up()
    assert [end.worker for end in ends if isinstance(end, e.End)] == [Worker(0, 0)]


def test_with_much_to_tell_a_beat_comes_at_once_but_not_all_the_time() -> None:
    talk, beats = joined(), list[float]()
    for millisecond in range(500):
        if talk.rows.add(millisecond, MeterRow((1,) * len(PHASES), 0, 0, follows=True)):
            talk.beat_soon()
        beats += [millisecond / 1e3 for request in talk.due(millisecond / 1e3) if isinstance(request, e.Beat)]
    assert beats == [0.0, 0.125, 0.25, 0.375], "one in 1/8 s"


def test_a_worker_that_slept_hears_what_came_meanwhile_before_it_gives_up_the_scheduler() -> None:
    talk = joined(host=Worker(0, 0))
    talk.hear(e.Now(1, LINE))
    talk.lifeline(there=True)
    for now in (0.0, 100.0):
        talk.due(now)
        assert talk.given_up() == []


def test_an_invitation_a_line_and_the_end_are_heard_of_once_over_either_line() -> None:
    talk, invitation, end = joined(), m.Invitation(PAIR, 3), e.End("broke", True, True, ME)
    for reply, effect in (
        (invitation, invitation),
        (e.Now(1, LINE), c.Connect(5, b"nonce")),
        (e.Now(0, over=end), end),
    ):
        assert talk.hear(reply) == [effect]
        assert talk.hear(reply) == []
    assert talk.hear(e.Now(0, over=e.End("lost its neighbour", True))) == []
    assert talk.stop == end


# ------------------------------------------------------------------------------------------------- all histories


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Of a message's types, with few values of each, so that they meet."""
    match kind:
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: any_of(field.type) for field in fields})
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(any_of, types))
        case msgspec.inspect.VarTupleType(item_type=item, min_length=least):
            return st.lists(any_of(item), min_size=least or 0, max_size=2).map(tuple)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*map(any_of, items))
        case msgspec.inspect.StrType():
            return st.sampled_from(["", "0", "1", "a/b"])
        case msgspec.inspect.BytesType():
            return st.sampled_from([b"", b"0"])
        case msgspec.inspect.IntType(ge=least):
            return st.integers(least or 0, 9)
        case msgspec.inspect.FloatType():
            return st.sampled_from([0.0, 1.0])
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
    raise AssertionError(kind)


REPLIES = st.one_of(
    any_of(msgspec.inspect.type_info(kind))
    for kind in (*get_args(m.Reply), *get_args(e.Reply))
    if kind is not m.StatusReply
)
ANEW = (e.Waits, e.Stranger)
"""Of what a request waits for the last one counts; and what is answered anew each time."""


def ask_everything(talk: c.Conversation) -> None:
    talk.ask(e.Enrol, {"model": "linear"})
    talk.ask(e.Meet, "0", b"")
    talk.ask(e.Store, "wait", ("a/b",))
    talk.ask(e.Store, "add", ("a/n",), b"", 1)
    talk.ask(e.TellSnapshot, "0", 4)
    talk.tell(e.Publish, "newest.ckpt", 4, True)


def believed(talk: c.Conversation) -> object:
    of_training = talk.joined, talk.leases.book()
    return talk.epoch, talk.donations, talk.held_up, talk.stop, talk.held, of_training, [*talk._open]


ASKS: st.SearchStrategy[Any] = st.sampled_from(
    [(m.Hello,), (m.Join,), (m.Leave,), (m.Ready, 1), (m.AskLease, SEGMENT, 0)]
)


@settings(deadline=None)
@given(st.data())
def test_no_sequence_of_replies_breaks_a_conversation_and_repeated_ones_change_nothing(data: st.DataObject) -> None:
    talk, heard = conversation(), list[e.Reply | m.Reply]()
    ask_everything(talk)
    for now in range(data.draw(st.integers(1, 12))):
        for kind, *fields in data.draw(st.lists(ASKS, max_size=3)):
            talk.ask(kind, *fields)
            heard.clear()  # the same reply may answer another question
        reply, number = decode_reply(encode(data.draw(REPLIES))), talk._number
        for effect in talk.hear(reply):
            if isinstance(effect, c.Replied):
                assert effect.key not in talk._open
        if getattr(reply, "number", 0) <= number:
            heard.append(reply)  # others answer what is not said yet
        before = believed(talk)
        for again in heard:
            if not isinstance(again, ANEW):
                assert talk.hear(again) == []
        assert believed(talk) == before
        for request in [*talk.due_in_training(math.inf), *talk.due(float(now))]:
            assert decode_request(encode(request)) == request
        assert talk.deadline >= now
