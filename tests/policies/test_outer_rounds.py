"""DiLoCo's rounds: who is waited for, and when a round is due. Breaking rounds are in the tests of rounds of all."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_sdpipe.policies import Group, Joined, Left, Lost, Progress, Ready, Restarted, Worker
from lightning_sdpipe.policies.events import Contains
from lightning_sdpipe.policies.outer_rounds import OuterRounds, OuterRoundsPolicy
from tests.policies.scripted import brief, joined

WHY, AGAIN = "everybody came", "made again"


def ready(
    it: OuterRoundsPolicy, pipeline: int, iteration: int, contains: int, now: float, stage: int = 0, again: bool = False
) -> list[Group]:
    return it.on(Ready(Worker(stage, pipeline), iteration, contains, again), now)


def policy(pipelines: int = 4, stages: int = 1, every: int | None = None) -> Any:
    return joined(OuterRounds, stages, pipelines, every=every)


def test_where_all_are_waited_for_the_last_one_lets_them_go_and_one_that_was_away_gets_their_base_first() -> None:
    rounds = policy()
    assert [ready(rounds, pipeline, 4, 0, 1.0) for pipeline in range(3)] == [[], [], []]
    assert brief(rounds.on(Left(Worker(0, 3)), 2.0)) == [(0, (0, 1, 2), "worker lost")]
    rounds.on(Joined(Worker(0, 3)), 3.0)
    assert [ready(rounds, pipeline, 8, 1, 4.0) for pipeline in range(3)] == [[], [], []]
    (given,) = ready(rounds, 3, 8, 0, 5.0)
    assert (brief([given]), given.source) == ([(0, (2, 3), "handed over")], Worker(0, 2))
    assert brief(ready(rounds, 3, 9, 1, 6.0)) == [(0, (0, 1, 2, 3), WHY)]


def test_a_round_is_due_after_so_many_updates_of_all_whichever_pipelines_make_them() -> None:
    """All are ready all the time; what counts is what they say of their steps."""
    rounds = policy(2, stages=2, every=4)
    for pipeline, stage in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert ready(rounds, pipeline, 1, 0, 1.0, stage) == []
    assert rounds.on(Progress(Worker(0, 0), 6, 6, 0.1, 0.0), 2.0) == []
    assert rounds.on(Progress(Worker(1, 0), 6, 6, 0.1, 0.0), 2.0) == [], "the first stage has told of these"
    due = rounds.on(Progress(Worker(0, 1), 2, 2, 0.3, 0.0), 2.1)
    assert brief(due) == [(0, (0, 1), WHY), (1, (0, 1), WHY)]
    assert rounds.on(Progress(Worker(0, 0), 15, 9, 0.1, 0.0), 3.0) == [], "none is ready for the next one yet"
    for pipeline, stage in ((0, 0), (0, 1), (1, 0)):
        assert ready(rounds, pipeline, 15, 1, 3.0, stage) == []
    assert len(ready(rounds, 1, 15, 1, 3.5, 1)) == 2


def test_a_round_that_has_broken_off_is_due_at_once_on_its_stage() -> None:
    rounds = policy(2, stages=2, every=1)
    rounds.on(Progress(Worker(0, 0), 1, 2, 0.1, 0.0), 0.0)
    for pipeline, stage in ((0, 0), (0, 1), (1, 0)):
        assert ready(rounds, pipeline, 1, 0, 1.0, stage) == []
    assert len(ready(rounds, 1, 1, 0, 1.0, 1)) == 2
    for pipeline in (0, 1):
        assert ready(rounds, pipeline, 2, 1, 2.0) == [], "it has ended there"
    assert ready(rounds, 0, 2, 0, 2.0, 1, again=True) == []
    assert brief(ready(rounds, 1, 2, 0, 2.0, 1, again=True)) == [(1, (0, 1), AGAIN)]


def test_one_that_rested_in_a_round_is_not_asked_to_make_it_again_but_gets_it() -> None:
    """Without stage 0, which has its outcome, it would never begin it."""
    rounds = policy(4, stages=2)
    for stage in (0, 1):
        rounds.on(Left(Worker(stage, 2)), 0.0)
    began = [ready(rounds, pipeline, 1, 0, 1.0, stage) for pipeline in (0, 1, 3) for stage in (0, 1)]
    assert brief(began[-1]) == [(0, (0, 1, 3), WHY), (1, (0, 1, 3), WHY)]
    for stage in (0, 1):  # stage 0 has ended for 0 and 1
        rounds.on(Lost(Worker(stage, 3)), 2.0)
        rounds.on(Joined(Worker(stage, 2)), 2.0)
    assert [ready(rounds, pipeline, 2, 0, 3.0, 1, again=True) for pipeline in (0, 1)] == [[], []]
    assert brief(ready(rounds, 2, 1, 0, 3.0, 1)) == [(1, (0, 1), AGAIN)]
    assert brief(ready(rounds, 0, 3, 1, 4.0, 1)) == [(1, (0, 2), "handed over")]


def test_a_stage_whose_last_round_none_has_does_not_hold_up_the_next_one_of_all() -> None:
    rounds = policy(2, stages=2)
    for stage in (0, 1):
        rounds.on(Left(Worker(stage, 1)), 0.0)
    assert [len(ready(rounds, 0, 1, 0, 1.0, stage)) for stage in (0, 1)] == [0, 2]
    for stage in (0, 1):
        rounds.on(Joined(Worker(stage, 1)), 2.0)
    rounds.on(Contains(Worker(0, 0), 1), 3.0)
    assert brief(ready(rounds, 1, 1, 0, 3.0)) == [(0, (0, 1), "handed over")]
    for stage in (0, 1):
        rounds.on(Lost(Worker(stage, 0)), 4.0)
    assert ready(rounds, 1, 1, 0, 5.0, 1) == [], "it was not in that round"
    assert brief(ready(rounds, 1, 2, 1, 5.0)) == [(0, (1,), WHY), (1, (1,), WHY)]


def test_after_a_restart_a_round_that_may_have_broken_off_is_due() -> None:
    rounds = policy(2, every=100)
    rounds.on(Restarted(7), 0.0)
    assert ready(rounds, 0, 4, 3, 1.0) == []
    assert brief(ready(rounds, 1, 4, 3, 1.0)) == [(0, (0, 1), WHY)]
    assert [ready(rounds, pipeline, 5, 4, 2.0) for pipeline in (0, 1)] == [[], []]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_after_a_restart_a_round_that_has_broken_off_is_made_again_whatever_other_stages_contain(lost: int) -> None:
    """Outcomes that were lost on a stage before make its rounds fewer. One that stands is not asked to make it."""
    rounds = policy(3, stages=2, every=100)
    rounds.on(Restarted(7), 0.0)
    for pipeline in range(3):
        assert ready(rounds, pipeline, 4, 3 + lost, 1.0) == []
    assert [ready(rounds, pipeline, 4, 3, 1.0, 1, again=pipeline > 0) for pipeline in (0, 1)] == [[], []]
    assert brief(ready(rounds, 2, 4, 3, 1.0, 1, again=True)) == [(1, (1, 2), AGAIN)]


def test_those_that_rest_hand_the_newest_base_over_unless_they_are_lost() -> None:
    rounds = policy(2)
    rounds.on(Left(Worker(0, 1)), 0.0)
    assert brief(ready(rounds, 0, 4, 0, 1.0)) == [(0, (0,), WHY)]
    assert ready(rounds, 0, 5, 1, 2.0) != []
    rounds.on(Joined(Worker(0, 1)), 3.0)
    rounds.on(Left(Worker(0, 0)), 3.0)
    (given,) = ready(rounds, 1, 4, 0, 4.0)
    assert given.source == Worker(0, 0)
    rounds.on(Joined(Worker(0, 0)), 5.0)
    rounds.on(Lost(Worker(0, 0)), 5.0)
    assert brief(ready(rounds, 1, 5, 0, 6.0)) == [(0, (1,), WHY)]
