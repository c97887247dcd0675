"""DiLoCo's rounds: who is waited for, and one lineage of bases, whatever happens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from lightning_sdpipe.policies import Answered, Group, Joined, Left, Lost, Progress, Ready, Restarted, Worker
from lightning_sdpipe.policies.decisions import Lineage
from lightning_sdpipe.policies.events import Regrouped
from lightning_sdpipe.policies.outer_rounds import OuterRounds, OuterRoundsPolicy
from tests.policies.lineages import Violation, World
from tests.policies.scripted import brief, join_all

HISTORIES, STEPS = 60, 600


class AnyBase(OuterRoundsPolicy):
    """Without the first rule: a round goes on from the newest base of its own members."""

    def _with_lineage(self, group: Group) -> Group:
        bases, pipelines = self._bases[group.stage], [worker.pipeline for worker in group.members]
        of = tuple(bases.at_most[pipeline] for pipeline in pipelines)
        bases.goes_out(pipelines, group.sequence)
        return msgspec.structs.replace(group, lineage=Lineage(of, max(of)))


def histories(count: int, **rules: Any) -> tuple[Counter[str], int]:
    """What happened in so many histories, and how many of them broke a promise."""
    happened: Counter[str] = Counter()
    broke = 0
    for seed in range(count):
        world = World(seed, **rules)
        try:
            world.run(STEPS)
        except Violation:
            broke += 1
        happened.update(world.counts)
    return happened, broke


def test_every_update_is_in_one_line_of_bases_once() -> None:
    happened, broke = histories(HISTORIES)
    assert not broke
    rare = {name: happened[name] for name in ("rounds", "behind", "handed", "again", "dropped", "deaths", "came")}
    assert all(rare.values()), rare


RULES = {"any base": {"make": AnyBase}, "no hand-over": {"hands_over": False}, "always again": {"always_again": True}}


@pytest.mark.parametrize("without", RULES)
def test_without_one_of_the_rules_it_forks_or_puts_updates_in_twice(without: str) -> None:
    assert histories(HISTORIES, **RULES[without])[1]


def test_the_base_of_a_round_that_was_given_up_is_older_than_all_others() -> None:
    """A donor had it, and nobody who took part: they keep what they brought, which is in it."""
    rounds = policy(2)
    ready(rounds, 0, 4, -1, 1.0)
    ready(rounds, 1, 4, -1, 1.0)
    rounds.on(Lost(Worker(0, 0)), 2.0)
    rounds.on(Regrouped(0, (Worker(0, 1),), (1.0,), (-1,)), 2.0)
    rounds.on(Joined(Worker(0, 0)), 3.0)
    assert ready(rounds, 0, 4, 0, 4.0) == []
    (group,) = ready(rounds, 1, 8, 1, 5.0)
    assert group.lineage is not None
    assert group.lineage.bases[0] < group.lineage.bases[1] == 1


def test_a_base_that_one_outside_of_the_round_may_have_is_the_newest() -> None:
    """It was handed over to one that took no part, before its maker was lost; it has joined anew to say so."""
    rounds = policy(3)
    rounds.on(Left(Worker(0, 2)), 1.0)
    ready(rounds, 0, 4, -1, 1.0)
    ready(rounds, 1, 4, -1, 1.0)
    rounds.on(Joined(Worker(0, 2)), 2.0)
    rounds.on(Lost(Worker(0, 0)), 2.0)
    (dropped,) = rounds.on(Regrouped(0, (Worker(0, 1),), (1.0,), (-1,)), 3.0)
    assert isinstance(dropped, Group)
    assert dropped.lineage == Lineage((-1,), 0)
    assert ready(rounds, 2, 4, 0, 4.0) == []
    (group,) = ready(rounds, 1, 8, -1, 4.0)
    assert group.lineage == Lineage((-1, 0), 0)


@pytest.mark.parametrize("answered", [False, True])
def test_after_a_restart_those_that_have_not_told_may_have_any_base(answered: bool) -> None:
    """The other one then drops its round; so it does if the base is that of a round that was answered again."""
    rounds = policy(2)
    rounds.on(Restarted(7), 0.0)
    if answered:
        ready(rounds, 0, 4, 4, 1.0)
        rounds.on(Answered(Worker(0, 0), 4), 1.0)
    rounds.on(Left(Worker(0, 0)), 1.0)
    (dropped,) = ready(rounds, 1, 8, 5, 2.0)
    assert dropped.lineage == Lineage((5,), 6)
    assert not dropped.lineage.goes_on


def ready(
    policy: OuterRoundsPolicy, pipeline: int, iteration: int, base: int, now: float, stage: int = 0
) -> list[Group]:
    return policy.on(Ready(Worker(stage, pipeline), iteration, base), now)


def policy(pipelines: int = 4, stages: int = 1, every: int | None = None) -> OuterRoundsPolicy:
    made = OuterRounds(every).make_policy(stages, pipelines)
    join_all(made, stages, pipelines)
    return made


def test_where_all_are_waited_for_the_last_one_lets_them_go() -> None:
    rounds = policy()
    assert [ready(rounds, pipeline, 4, -1, 1.0) for pipeline in range(3)] == [[], [], []]
    assert brief(rounds.on(Left(Worker(0, 3)), 2.0)) == [(0, (0, 1, 2), "worker lost")]
    rounds.on(Joined(Worker(0, 3)), 3.0)
    assert [ready(rounds, pipeline, 8, 0, 4.0) for pipeline in range(3)] == [[], [], []]
    (second,) = ready(rounds, 3, 8, -1, 5.0)
    assert second.lineage == Lineage((0, 0, 0, -1), 0)


def test_a_round_is_due_after_so_many_updates_of_all_whichever_pipelines_make_them() -> None:
    """All are ready all the time; what counts is what they say of their steps."""
    rounds = policy(2, stages=2, every=4)
    for pipeline, stage in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert ready(rounds, pipeline, 1, -1, 1.0, stage) == []
    assert rounds.on(Progress(Worker(0, 0), 6, 6, 0.1, 0.0), 2.0) == []
    assert rounds.on(Progress(Worker(1, 0), 6, 6, 0.1, 0.0), 2.0) == [], "the first stage has told of these"
    due = rounds.on(Progress(Worker(0, 1), 2, 2, 0.3, 0.0), 2.1)
    assert brief(due) == [(0, (0, 1), "everybody came"), (1, (0, 1), "everybody came")]
    assert rounds.on(Progress(Worker(0, 0), 15, 9, 0.1, 0.0), 3.0) == [], "none is ready for the next one yet"
    for pipeline, stage in ((0, 0), (0, 1), (1, 0)):
        assert ready(rounds, pipeline, 15, 0, 3.0, stage) == []
    assert len(ready(rounds, 1, 15, 1, 3.5, 1)) == 2


def test_those_that_rest_keep_the_newest_base_and_others_go_on_without_a_round() -> None:
    rounds = policy(2)
    rounds.on(Left(Worker(0, 1)), 0.0)
    ready(rounds, 0, 4, -1, 1.0)
    rounds.on(Joined(Worker(0, 1)), 2.0)
    rounds.on(Left(Worker(0, 0)), 2.0)
    (dropped,) = ready(rounds, 1, 4, -1, 3.0)
    assert dropped.lineage is not None
    assert not dropped.lineage.goes_on


def test_all_stages_of_a_pipeline_are_in_the_same_rounds() -> None:
    rounds = policy(2, stages=2)
    for pipeline, stage in ((0, 1), (1, 1), (1, 0)):
        assert ready(rounds, pipeline, 4, -1, 1.0, stage) == []
    why = "everybody came"
    assert brief(ready(rounds, 0, 4, -1, 1.0)) == [(0, (0, 1), why), (1, (0, 1), why)]
