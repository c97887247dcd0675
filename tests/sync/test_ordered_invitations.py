"""The order of one worker's meetings, whatever the order in which it hears of them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.sync.hybrid_groups import OrderedInvitations
from tests.patience import until

ME, OTHER = Worker(0, 0), Worker(0, 1)


def active(sequence: int) -> Group:
    return Group((ME, OTHER), (0.5, 0.5), sequence, "tested")


def computing(sequence: int) -> Group:
    return Group((ME, OTHER), (0.5, 0.5), sequence, "tested", passive=(ME,))


def standing(sequence: int) -> Group:
    return Group((ME, OTHER), (0.5, 0.5), sequence, "tested", passive=(ME,), standing=(ME,))


class Recorder:
    """What was carried out, with the step or without; the meeting of number 13 fails."""

    def __init__(self) -> None:
        self.done: list[tuple[int, bool]] = []

    def __call__(self, group: Group, with_step: bool) -> float:
        if group.sequence == 13:
            raise WorkerFailedError("it broke off")
        self.done.append((group.sequence, with_step))
        return 0.25

    def wait_for(self, *sequences: int) -> None:
        until(lambda: [number for number, _ in self.done] == [*sequences], lambda: self.done)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def meetings(recorder: Recorder) -> Iterator[OrderedInvitations]:
    meetings = OrderedInvitations(ME, recorder, timedelta(seconds=5))
    meetings.begin()
    yield meetings
    thread = meetings._thread
    if meetings._failure is None:
        meetings.end()
    if thread is not None:
        thread.join()
        assert not thread.is_alive()


def test_who_computes_serves_at_once(meetings: OrderedInvitations, recorder: Recorder) -> None:
    meetings.invite(computing(3), None)
    meetings.invite(computing(4), None)
    recorder.wait_for(3, 4)
    assert recorder.done == [(3, False), (4, False)]


def test_an_invitation_that_was_decided_after_an_answer_waits_until_this_is_carried_out(
    meetings: OrderedInvitations, recorder: Recorder
) -> None:
    meetings.invite(computing(2), None)
    meetings.invite(computing(6), 0)  # heard of before the answer, 5
    meetings.stand()
    assert meetings.go_on(0, active(5)) == 0.25
    recorder.wait_for(2, 5, 6)
    assert recorder.done == [(2, False), (5, True), (6, False)]


def test_who_is_standing_gives_its_step_but_not_before_it_is_there(
    meetings: OrderedInvitations, recorder: Recorder
) -> None:
    meetings.invite(standing(1), None)
    meetings.invite(standing(2), None)
    assert recorder.done == []
    meetings.stand()
    meetings.go_on(0, active(3))
    assert recorder.done == [(1, True), (2, True), (3, True)]
    meetings.invite(standing(4), 0)
    assert len(recorder.done) == 3, "the step of iteration 1 has not ended"
    meetings.stand()
    recorder.wait_for(1, 2, 3, 4)
    assert recorder.done[3] == (4, True)


def test_a_worker_that_leaves_carries_out_what_it_was_invited_to(
    meetings: OrderedInvitations, recorder: Recorder
) -> None:
    meetings.stand()
    meetings.go_on(7, active(1))
    meetings.invite(computing(2), 7)
    meetings.end()
    assert recorder.done == [(1, True), (2, False)]
    meetings.begin()
    meetings.invite(computing(9), None)
    recorder.wait_for(1, 2, 9)


def test_a_failure_in_an_invitation_is_raised_where_the_training_asks_next(meetings: OrderedInvitations) -> None:
    meetings.invite(computing(13), None)
    meetings.stand()
    with pytest.raises(WorkerFailedError, match="it broke off"):
        meetings.go_on(0, active(14))


def test_a_wait_ends_and_names_the_meeting(recorder: Recorder) -> None:
    meetings = OrderedInvitations(ME, recorder, timedelta(seconds=0.05))
    meetings.invite(computing(1), 3)
    meetings.stand()
    with pytest.raises(WorkerFailedError, match=r"waited 0.05 s until earlier meetings.*sequence=1"):
        meetings.go_on(4, active(2))
