"""DiLoCo's rounds by quorum: who is waited for, and one lineage of bases, whatever happens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies import Group, Joined, Left, Lost, Ready, Tick, Worker
from lightning_sdpipe.policies.decisions import Lineage
from lightning_sdpipe.policies.events import Regrouped
from lightning_sdpipe.policies.outer_rounds import OuterRounds, OuterRoundsPolicy
from tests.policies.lineages import Violation, World
from tests.policies.scripted import brief, join_all

HISTORIES, STEPS = 60, 600


class AnyBase(OuterRoundsPolicy):
    """Without the first rule: a round goes on from the newest base of its own members."""

    def _has_newest(self) -> bool:
        return True

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
    rounds = policy(1, grace=0.0, pipelines=3)
    rounds.on(Left(Worker(0, 2)), 0.0)
    ready(rounds, 0, 4, -1, 1.0)
    rounds.on(Lost(Worker(0, 0)), 2.0)
    rounds.on(Regrouped(0, (Worker(0, 1),), (1.0,), (-1,)), 2.0)
    rounds.on(Joined(Worker(0, 0)), 3.0)
    assert ready(rounds, 0, 4, 0, 4.0) == []
    (group,) = ready(rounds, 1, 8, 1, 5.0)
    assert group.lineage is not None
    assert group.lineage.bases[0] < group.lineage.bases[1] == 1


def test_a_base_that_one_outside_of_the_round_may_have_is_the_newest() -> None:
    """It was handed over to one that took no part, before its maker was lost; it has joined anew to say so."""
    rounds = policy(1, grace=0.0, pipelines=3)
    ready(rounds, 0, 4, -1, 1.0)
    rounds.on(Left(Worker(0, 2)), 2.0)
    rounds.on(Joined(Worker(0, 2)), 2.0)
    rounds.on(Lost(Worker(0, 0)), 2.0)
    (dropped,) = rounds.on(Regrouped(0, (Worker(0, 1),), (1.0,), (-1,)), 3.0)
    assert isinstance(dropped, Group)
    assert dropped.lineage == Lineage((-1,), 0)
    (group,) = ready(rounds, 2, 4, 0, 4.0)
    assert group.lineage == Lineage((0,), 0)


def ready(
    policy: OuterRoundsPolicy, pipeline: int, iteration: int, base: int, now: float, stage: int = 0
) -> list[Group]:
    return policy.on(Ready(Worker(stage, pipeline), iteration, base), now)


def policy(quorum: Any = None, grace: Any = "auto", pipelines: int = 4, stages: int = 1) -> OuterRoundsPolicy:
    made = OuterRounds(quorum, grace).make_policy(stages, pipelines)
    join_all(made, stages, pipelines)
    return made


def test_a_straggler_is_not_waited_for_and_gets_the_base_when_it_comes() -> None:
    """Its round needs one that has the newest base, so it waits for the others."""
    rounds = policy(0.5, grace=1.0)
    assert ready(rounds, 0, 4, -1, 10.0) == []
    assert rounds.deadline() is None
    assert ready(rounds, 1, 4, -1, 10.1) == []
    assert rounds.deadline() == 11.1
    assert ready(rounds, 2, 4, -1, 10.5) == []
    (first,) = rounds.on(Tick(), 11.1)
    assert brief([first]) == [(0, (0, 1, 2), "quorum")]
    assert first.lineage == Lineage((-1, -1, -1), -1)
    assert ready(rounds, 3, 4, -1, 15.0) == []
    assert rounds.deadline() is None, "it alone is no quorum"
    assert ready(rounds, 0, 8, 0, 20.0) == []
    (second,) = rounds.on(Tick(), 21.0)
    assert brief([second]) == [(0, (0, 3), "quorum")]
    assert second.lineage == Lineage((0, -1), 0)


def test_a_quorum_without_the_newest_base_waits_for_it() -> None:
    rounds = policy(2, grace=0.0)
    ready(rounds, 0, 4, -1, 1.0)
    assert brief(ready(rounds, 1, 4, -1, 1.0)) == [(0, (0, 1), "quorum")]
    ready(rounds, 2, 4, -1, 2.0)
    assert ready(rounds, 3, 4, -1, 2.0) == []
    (second,) = ready(rounds, 1, 8, 0, 3.0)
    assert brief([second]) == [(0, (1, 2, 3), "quorum")]
    assert second.lineage == Lineage((0, -1, -1), 0)


def test_where_all_are_waited_for_the_last_one_lets_them_go() -> None:
    rounds = policy()
    assert [ready(rounds, pipeline, 4, -1, 1.0) for pipeline in range(3)] == [[], [], []]
    assert brief(rounds.on(Left(Worker(0, 3)), 2.0)) == [(0, (0, 1, 2), "worker lost")]
    rounds.on(Joined(Worker(0, 3)), 3.0)
    assert [ready(rounds, pipeline, 8, 0, 4.0) for pipeline in range(3)] == [[], [], []]
    (second,) = ready(rounds, 3, 8, -1, 5.0)
    assert second.lineage == Lineage((0, 0, 0, -1), 0)


def test_those_that_rest_keep_the_newest_base_and_others_go_on_without_a_round() -> None:
    rounds = policy(1, grace=0.0, pipelines=2)
    ready(rounds, 0, 4, -1, 1.0)
    rounds.on(Left(Worker(0, 0)), 2.0)
    (dropped,) = ready(rounds, 1, 4, -1, 3.0)
    assert dropped.lineage is not None
    assert not dropped.lineage.goes_on


def test_all_stages_of_a_pipeline_are_in_the_same_rounds() -> None:
    rounds = policy(1, grace=0.0, pipelines=2, stages=2)
    assert ready(rounds, 0, 4, -1, 1.0, stage=1) == []
    assert brief(ready(rounds, 0, 4, -1, 1.0)) == [(0, (0,), "quorum"), (1, (0,), "quorum")]


@pytest.mark.parametrize(
    ("values", "instead"),
    [
        *(({"quorum": q}, "a share of those present") for q in (0, -1, True, "half", 0.0, 1.5, float("nan"))),
        *(({"quorum": 1, "grace": g}, "finite seconds") for g in (-1.0, float("inf"), "long", True)),
        ({"grace": 1.0}, "or a quorum, such as 0.5"),
    ],
)
def test_values_that_mean_nothing_are_refused_with_what_does(values: dict[str, Any], instead: str) -> None:
    with pytest.raises(ConfigurationError, match=instead):
        OuterRounds(**values)


def test_more_than_there_are_cannot_be_needed() -> None:
    with pytest.raises(ConfigurationError, match="quorum=5 is not allowed; give 1 to 4"):
        policy(5)
    assert [OuterRounds(0.5).needed(n) for n in (1, 2, 3, 4)] == [1, 1, 2, 2]
    assert [OuterRounds(3).needed(n) for n in (2, 4)] == [2, 3]
