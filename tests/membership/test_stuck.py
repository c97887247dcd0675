"""Which exchanges are stuck: scripted words of workers."""

from __future__ import annotations

from lightning_sdpipe.membership.failure_detection import BARRIERS, Stuck
from lightning_sdpipe.membership.members import Exchanging
from lightning_sdpipe.policies import Worker

A, B, C = (Worker(0, i) for i in range(3))
NONE = (-1, -1)


def within(sequence: int, *pipelines: int, moved: int = 0) -> Exchanging:
    return Exchanging(sequence, pipelines or (0, 1, 2), moved)


def test_what_nobody_moves_for_the_limit_since_the_last_one_began_is_stuck() -> None:
    stuck = Stuck(5.0)
    for worker, now in ((A, 0.0), (B, 1.0), (C, 3.0)):
        stuck.hear(worker, within(4), NONE, now)
    assert stuck.due == 5.0
    assert stuck.look(7.9, [A, B, C]) == []
    assert stuck.look(8.0, [A, B, C]) == [(4, [A, B, C])]
    assert stuck.look(12.0, [A, B, C]) == [], "they have been told"
    assert stuck.look(13.0, [A, B, C]) == [(4, [A, B, C])], "which may have been lost"


def test_who_waits_for_one_that_still_computes_is_not_stuck() -> None:
    stuck = Stuck(5.0)
    stuck.hear(A, within(4), NONE, 0.0)
    stuck.hear(B, None, (3, -1), 0.0)
    assert stuck.look(60.0, [A, B]) == []
    assert stuck.look(60.0, [A]) == [(4, [A])], "but for one that is gone nobody waits"


def test_who_is_left_behind_by_those_that_have_the_result_is_stuck() -> None:
    stuck = Stuck(5.0)
    stuck.hear(A, within(4), NONE, 0.0)
    stuck.hear(B, None, (4, -1), 0.0)
    stuck.hear(C, within(6, 1, 2), (5, -1), 0.0)
    assert stuck.look(5.0, [A, B, C]) == [(4, [A])]


def test_what_moves_is_not_stuck_however_long_it_takes() -> None:
    stuck = Stuck(5.0)
    for piece in range(20):
        stuck.hear(A, within(4, 0, 1, moved=piece), NONE, 4.0 * piece)
        stuck.hear(B, within(4, 0, 1), NONE, 4.0 * piece)
        assert stuck.look(4.0 * piece + 3.9, [A, B]) == []


def test_barriers_are_numbered_apart_from_groups() -> None:
    stuck = Stuck(5.0)
    stuck.hear(A, within(BARRIERS, 0, 1), (900, -1), 0.0)
    stuck.hear(B, None, (901, -1), 0.0)
    assert stuck.look(60.0, [A, B]) == []
    stuck.hear(B, None, (901, BARRIERS), 60.0)
    assert stuck.look(60.0, [A, B]) == [(BARRIERS, [A])]


def test_with_nobody_in_an_exchange_there_is_nothing_to_look_for() -> None:
    stuck = Stuck(5.0)
    stuck.hear(A, within(4), NONE, 0.0)
    stuck.hear(A, None, (4, -1), 1.0)
    stuck.hear(B, within(4), NONE, 1.0)
    stuck.forget(B)
    assert stuck.look(5.0, [A]) == []
    assert stuck.due == float("inf")
