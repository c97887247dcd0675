"""What a worker brings back to a scheduler that was restarted."""

from __future__ import annotations

from itertools import permutations

import pytest

from lightning_sdpipe.membership.members import FIXED, Epoch, Member
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import reporting
from lightning_sdpipe.scheduler.client.reporting import MEMBERS_IN_REPORT, HeardAnswers
from lightning_sdpipe.scheduler.server.service import SchedulerService


def answer(number: int, *pipelines: int, passive: tuple[int, ...] = ()) -> m.Answer:
    members = tuple(Worker(0, i) for i in pipelines)
    bystanders = tuple(Worker(0, i) for i in passive)
    group = Group(members, (1 / len(members),) * len(members), number, "test", bystanders)
    return m.Answer(group, tuple(None if i in passive else number for i in pipelines))


def reported(heard: HeardAnswers) -> list[int]:
    return [a.group.sequence for a in heard.to_report()]


def test_an_answer_is_kept_until_each_other_member_was_in_a_later_group() -> None:
    heard = HeardAnswers(Worker(0, 0))
    assert heard.highest == -1
    for a, expected in (
        (answer(3, 0, 1, 2), [3]),
        (answer(4, 0, 1), [3, 4]),  # 2 may not have heard of 3
        (answer(5, 0), [3, 4, 5]),  # its own newest is always among them
        (answer(6, 0, 1, passive=(1,)), [3, 4, 6]),  # who is passive asked for nothing, and proves nothing
        (answer(8, 0, 2), [4, 8]),
        (answer(9, 0, 1, 2), [9]),
    ):
        heard.hear(a)
        assert reported(heard) == expected
    assert heard.highest == 9
    heard.forget()
    assert reported(heard) == []
    assert heard.highest == 9


def test_a_report_fits_into_a_request(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    full = answer(1, *range(MEMBERS_IN_REPORT))
    resumes = e.Resumes(Epoch(1, (), ""), (), heard=1 << 40, joined=True, answered=1 << 40, answers=(full,))
    assert len(m.encode(e.Enrol(Worker(0, 0), (1 << 62) - 1, 1 << 40, FIXED, resumes))) < m.MAX_REQUEST_BYTES
    monkeypatch.setattr(reporting, "MEMBERS_IN_REPORT", 5)
    heard = HeardAnswers(Worker(0, 0))
    for a in (answer(1, 0, 1, 2), answer(2, 0, 1), answer(3, 0)):
        heard.hear(a)
    assert reported(heard) == [2, 3]
    assert "cannot report 1 groups at once" in caplog.text


HELD = [Worker(0, 0), Worker(1, 0), Worker(1, 1), Worker(0, 1)]


@pytest.mark.parametrize("order", list(permutations(HELD)))
@pytest.mark.parametrize("decided", [False, True])
def test_members_of_a_group_go_on_alike_in_whatever_order_they_come_back(order: list[Worker], decided: bool) -> None:
    """Both unanswered in both stages; the last stage's may have been decided, and heard of by another group."""
    service = SchedulerService(PHDPSGD(group_size=2, staleness=None, every=2), 2, 4)
    everybody = [Worker(j, i) for j in range(2) for i in range(4)]
    members = tuple(Worker(1, i) for i in range(4))
    epoch = Epoch(1, tuple(Member(i, 7) for i in range(4)), "together")
    told = m.Answer(Group(members, (0.25,) * 4, 9, "matched"), (4, 4, 4, 4))
    replies = []
    for worker in sorted(everybody, key=lambda worker: worker not in HELD):
        heard = decided and worker.stage == 1 and worker not in HELD
        answers, answered = ((told,), 4) if heard else ((), 3)
        resumes = e.Resumes(epoch, (), heard=9, joined=True, answered=answered, answers=answers)
        replies += service.handle(e.peer_of(worker, 7), e.Enrol(worker, 7, 1, FIXED, resumes), 0.0)
    for worker in order:
        replies += service.handle(m.routing_id(worker, 7), m.Ready(worker, 7, 2, 4), 0.0)
    replies += service.tick(0.0)
    service.validate()
    assert service.failure is None
    answer_of = {peer: reply.group for peer, reply in replies if isinstance(reply, m.Answer)}
    first, second = (answer_of[m.routing_id(Worker(0, i), 7)] for i in (0, 1))
    if decided:
        assert [first.members, second.members] == [(Worker(0, 0),), (Worker(0, 1),)]
        assert answer_of[m.routing_id(Worker(1, 0), 7)] == told.group
    else:
        assert first == second
        assert first.members == (Worker(0, 0), Worker(0, 1))
