"""What a worker brings back to a scheduler that was restarted."""

from __future__ import annotations

import pytest

from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.scheduler import messages as m
from lightning_sdpipe.scheduler import recovery
from lightning_sdpipe.scheduler.recovery import MEMBERS_IN_REPORT, HeardAnswers


def answer(number: int, *pipelines: int, passive: tuple[int, ...] = ()) -> m.Answer:
    members = tuple(Worker(0, i) for i in pipelines)
    bystanders = tuple(Worker(0, i) for i in passive)
    group = Group(members, (1 / len(members),) * len(members), number, "test", bystanders)
    return m.Answer(group, tuple(None if i in passive else number for i in pipelines))


def reported(heard: HeardAnswers) -> list[int]:
    return [a.group.sequence for a in heard.to_report()]


def test_an_answer_is_kept_until_each_other_member_was_in_a_later_group() -> None:
    heard = HeardAnswers(Worker(0, 0))
    assert heard.highest is None
    heard.joined()
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
    join = m.Join(Worker(0, 0), (1 << 63) - 1, 1 << 40, (8, 512), True, 1 << 40, (full,))
    assert len(m.encode(join)) < m.MAX_REQUEST_BYTES
    monkeypatch.setattr(recovery, "MEMBERS_IN_REPORT", 5)
    heard = HeardAnswers(Worker(0, 0))
    for a in (answer(1, 0, 1, 2), answer(2, 0, 1), answer(3, 0)):
        heard.hear(a)
    assert reported(heard) == [2, 3]
    assert "cannot report 1 groups at once" in caplog.text
