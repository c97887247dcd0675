"""Partial reduce: the numbers of its paper, what it refuses, and that neither it nor its groups ever freeze."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import Delays, Static
from lightning_sdpipe.policies import Decision, Event, Group, GroupPolicy, Joined, Left, Lost, Ready, Reason, Worker
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.pairing import uniform
from lightning_sdpipe.policies.partial_reduce import QUEUED, PartialReduce, fewest_groups, weights
from lightning_sdpipe.policies.registry import build
from lightning_sdpipe.policies.sync_graph import largest_learning_rate, mean_mixing_matrix, mixing_radius, network_error
from lightning_sdpipe.simulate import Work, jittered, simulate
from tests.policies.scripted import NaiveSyncGraph, brief, join_all, joined

W = Worker
HISTORIES = 2 * settings.default.max_examples  # 20,000 with --hypothesis-profile=long


def ready(policy: GroupPolicy, *workers: tuple[int, int, int], now: float = 0.0) -> list[Group]:
    """What follows when these have come: stage, pipeline, iteration."""
    return [group for stage, pipeline, k in workers for group in policy.on(Ready(W(stage, pipeline), k), now)]


@pytest.mark.parametrize(
    ("clocks", "decay", "closest", "oldest"),
    [
        ((10, 10, 10), 0.5, "1/3 1/3 1/3", "1/3 1/3 1/3"),
        ((10, 9, 8), 0.5, "4/7 2/7 1/7", "4/7 2/7 1/7"),
        ((10, 7), 0.5, "4/5 1/5", "8/15 7/15"),
        ((10, 9, 9), 0.5, "2/3 1/6 1/6", "2/3 1/6 1/6"),
        ((10, 10, 9), 0.5, "1/3 1/3 1/3", "1/3 1/3 1/3"),
        ((10, 9, 7), 0.5, "8/15 2/5 1/15", "8/15 4/15 1/5"),
        ((10, 1), 0.5, "32/33 1/33", "512/1023 511/1023"),
        ((10, 7), 0.9, "100/181 81/181", "1000/3439 2439/3439"),
    ],
)
def test_dynamic_weights_are_those_worked_out_by_hand(
    clocks: tuple[int, ...], decay: float, closest: str, oldest: str
) -> None:
    for missing, expected in (("closest", closest), ("oldest", oldest)):
        by_hand = [float(Fraction(text)) for text in expected.split()]
        assert weights(clocks, decay, missing) == pytest.approx(by_hand, rel=1e-14)


def test_without_a_stand_in_each_member_counts_by_its_own_rank() -> None:
    assert weights([10, 10, 9], 0.5, "none") == pytest.approx([0.4, 0.4, 0.2])
    assert weights([7, 10], 0.5, "none") == pytest.approx([1 / 9, 8 / 9])


def by_definition(clocks: list[int], decay: float, missing: str) -> list[float]:
    """Rank by rank, as the paper tells it."""
    ranks = [max(clocks) - clock + 1 for clock in clocks]
    shares = [0.0] * len(clocks)
    for rank in range(1, max(ranks) + 1):
        beta = (1 - decay) * decay ** (rank - 1) / (1 - decay ** max(ranks))
        stands_in = max(ranks) if missing == "oldest" else min(ranks, key=lambda other: (abs(other - rank), other))
        holders = [place for place, own in enumerate(ranks) if own == (rank if rank in ranks else stands_in)]
        for place in holders:
            shares[place] += beta / len(holders)
    return shares


@given(
    clocks=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    decay=st.floats(0.05, 0.95),
    missing=st.sampled_from(["closest", "oldest"]),
)
def test_weights_are_those_of_the_definition(clocks: list[int], decay: float, missing: str) -> None:
    assert weights(clocks, decay, missing) == pytest.approx(by_definition(clocks, decay, missing), rel=1e-9, abs=1e-12)


@given(
    clocks=st.lists(st.integers(0, 10**7), min_size=1, max_size=8),
    decay=st.floats(0, 1, exclude_min=True, exclude_max=True),
    missing=st.sampled_from(["closest", "oldest", "none"]),
)
def test_weights_always_add_up_and_never_favour_who_is_behind_under_closest(
    clocks: list[int], decay: float, missing: str
) -> None:
    shares = weights(clocks, decay, missing)
    assert math.fsum(shares) == pytest.approx(1.0, abs=1e-9)
    assert all(0.0 <= share <= 1.0 for share in shares)
    if missing == "none":
        assert sorted(shares, reverse=True) == [share for _, share in sorted(zip(clocks, shares, strict=True))[::-1]]


def test_dynamic_weights_move_the_mean_and_need_not_mix_symmetrically() -> None:
    shares = weights([10, 7], 0.5, "closest")
    assert sum(w * x for w, x in zip(shares, (0.0, 3.0), strict=True)) == pytest.approx(0.6)
    mean = numpy.array(mean_mixing_matrix([([0, 1], shares), ([2], [1.0])], range(3)))
    assert not numpy.allclose(mean.sum(0), 1.0)


@pytest.mark.parametrize(("n", "p"), [(3, 2), (8, 2), (8, 3), (8, 5), (4, 4)])
def test_rho_of_groups_that_are_all_as_likely(n: int, p: int) -> None:
    groups = [(list(group), [1 / p] * p) for group in combinations(range(n), p)]
    assert mixing_radius(mean_mixing_matrix(groups, range(n))) == pytest.approx((n - p) / (n - 1), abs=1e-9)
    known = {(3, 2): 0.5, (8, 2): 6 / 7, (8, 3): 5 / 7, (8, 5): 3 / 7, (4, 4): 0.0}
    assert (n - p) / (n - 1) == pytest.approx(known[n, p])


def theorem_1(learning_rate: float, lipschitz: float, num_workers: int, group_size: float, rho: float) -> float:
    """ηL + 2N³η²ρ̄/P² with η = Pγ/N: where it is at most 1, P-Reduce's theorem 1 holds (equation 7)."""
    step = group_size * learning_rate / num_workers
    bound = network_error(rho)
    return step * lipschitz + (2 * num_workers**3 * step**2 * bound / group_size**2 if step else 0.0)


def test_theorem_1() -> None:
    assert [network_error(rho) for rho in (0.0, 0.5, 0.625, 1.0)] == pytest.approx(
        [0.0, 17.4853, 37.7154, math.inf], rel=1e-5
    )
    # by hand: η = 2 · 0.01/3; η + 2 · 27 η² · 17.4853/4
    step = 0.02 / 3
    assert theorem_1(0.01, 1.0, 3, 2, 0.5) == pytest.approx(step + 13.5 * step**2 * 17.4853, rel=1e-5)
    largest = largest_learning_rate(2.0, 3, 2, 0.5)
    assert theorem_1(largest, 2.0, 3, 2, 0.5) == pytest.approx(1.0)
    assert largest_learning_rate(2.0, 4, 4, 0.0) == pytest.approx(0.5)  # all-reduce: γ = 1/L
    assert largest_learning_rate(1.0, 8, 3, 1.0) == 0.0
    assert theorem_1(0.1, 1.0, 8, 3, 1.0) == math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, r"group_size=1 is not allowed; give an integer from 2"),
        ({"decay": 0.0}, r"decay=0.0 is not allowed; give a number between 0 and 1, or null"),
        ({"decay": 1.0}, "decay=1.0"),
        ({"decay": math.nan}, "decay=nan"),
        ({"decay": 0.5, "missing": "newest"}, "missing='newest'.*closest.*oldest.*none"),
        ({"missing": "oldest"}, "missing='oldest' has no effect without decay.*such as 0.5"),
        ({"history": 0}, "history=0"),
    ],
)
def test_values_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PartialReduce(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "pipelines", "message"),
    [
        ({"group_size": 5}, 4, "group_size=5 is not allowed with 4 pipelines; give 2 to 4"),
        ({}, 1, "group_size=3 is not allowed with 1 pipelines; give it two pipelines or more, or use NoSync"),
        ({"group_size": 2, "history": 6}, 8, "history=6 .* connected by 7 groups at best; .* from 7, or null for 28"),
    ],
)
def test_what_does_not_fit_the_mesh_is_refused(options: dict[str, int], pipelines: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(PartialReduce(**options), 2, pipelines)


def test_a_pipeline_is_ready_when_all_of_its_stages_are() -> None:
    policy = joined(PartialReduce, 2, 3, group_size=2)
    assert ready(policy, (0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 2, 0)) == []
    groups = ready(policy, (1, 0, 0))
    assert brief(groups) == [(0, (0, 2), QUEUED), (1, (0, 2), QUEUED)]
    assert [group.weights for group in groups] == [(0.5, 0.5)] * 2
    assert ready(policy, (1, 1, 0)) == []


def with_a_stage_ahead() -> GroupPolicy:
    """Stage 0 of pipeline 0 fell silent, and stage 1 went on without it."""
    policy = joined(PartialReduce, 2, 2, group_size=2)
    policy.on(Left(W(0, 0)), 0.0)
    assert len(ready(policy, (1, 0, 4), (0, 1, 4), (1, 1, 4))) == 2
    policy.on(Joined(W(0, 0)), 1.0)
    return policy


def test_stages_at_different_iterations_come_together_again() -> None:
    policy = with_a_stage_ahead()
    assert ready(policy, (1, 0, 5), (0, 1, 5), (1, 1, 5)) == []
    groups = ready(policy, (0, 0, 4))
    assert brief(groups) == [(0, (0, 1), Reason.EVERYBODY_CAME), (1, (1,), Reason.EVERYBODY_CAME)]
    groups = ready(policy, (0, 1, 6), (1, 1, 6), (0, 0, 5))
    assert brief(groups) == [(0, (0, 1), Reason.EVERYBODY_CAME), (1, (0, 1), Reason.EVERYBODY_CAME)]


def test_who_is_ahead_of_a_stage_that_left_is_not_forgotten() -> None:
    policy = with_a_stage_ahead()
    assert ready(policy, (1, 0, 5), (0, 0, 4)) == []
    assert policy.on(Left(W(0, 0)), 2.0) == [], "pipeline 0 is ready with iteration 5 of stage 1 now"
    assert brief(ready(policy, (0, 1, 5), (1, 1, 5))) == [
        (0, (1,), Reason.EVERYBODY_CAME),
        (1, (0, 1), Reason.EVERYBODY_CAME),
    ]


def test_fewer_than_p_average_all_together() -> None:
    policy = joined(PartialReduce, 1, 4, group_size=3)
    assert ready(policy, (0, 3, 0), (0, 2, 0)) == []
    assert policy.on(Left(W(0, 0)), 1.0) == []
    assert brief(policy.on(Left(W(0, 1)), 2.0)) == [(0, (2, 3), Reason.WORKER_LOST)]
    assert brief(ready(policy, (0, 2, 1), (0, 3, 1))) == [(0, (2, 3), Reason.EVERYBODY_CAME)]
    policy.on(Left(W(0, 3)), 3.0)
    assert brief(ready(policy, (0, 2, 2))) == [(0, (2,), Reason.EVERYBODY_CAME)]


def test_the_history_follows_who_takes_part() -> None:
    """Four times the fewest groups that can connect them, unless it is given."""
    for history, expected in ((None, [28, 8, 28]), (11, [11, 11, 11])):
        policy = PartialReduce(group_size=2, history=history).make_policy(1, 8)
        found = []
        for change in (Joined, Left, Joined):
            for pipeline in range(3 if found else 0, 8):
                policy.on(change(W(0, pipeline)), 0.0)
            found.append(policy.sync_graph(0).rounds)
        assert found == expected


def test_clocks_count_readies_and_take_the_groups_largest() -> None:
    policy = joined(PartialReduce, 1, 3, group_size=2, decay=0.5)
    assert [g.weights for g in ready(policy, (0, 0, 0), (0, 1, 0))] == [(0.5, 0.5)]
    assert [g.weights for g in ready(policy, (0, 0, 1), (0, 1, 1))] == [(0.5, 0.5)]
    # pipelines 0 and 1 are at 2; their third and pipeline 2's first: ranks 1 and 3, and the rank between goes up
    (group,) = ready(policy, (0, 2, 0), (0, 0, 2))
    assert group.members == (W(0, 0), W(0, 2))
    assert group.weights == pytest.approx((6 / 7, 1 / 7))
    # both are at 3 now: with its next step pipeline 2 is one ahead of pipeline 1
    (group,) = ready(policy, (0, 1, 2), (0, 2, 1))
    assert group.weights == pytest.approx((1 / 3, 2 / 3))


def test_who_joins_has_the_largest_clock() -> None:
    policy = PartialReduce(group_size=2, decay=0.5).make_policy(1, 3)
    join_all(policy, 1, 2)
    ready(policy, (0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1))
    policy.on(Joined(W(0, 2)), 1.0)
    assert [g.weights for g in ready(policy, (0, 0, 2), (0, 2, 0))] == [(0.5, 0.5)]


def test_two_pairs_that_never_meet_are_brought_together() -> None:
    """Pipelines 0 and 1 are ready at 0, 1, 2, …, and 2 and 3 half a second later, if nobody waits for a group."""
    policy = joined(PartialReduce, 1, 4, group_size=2, history=3)
    due = {0: 0.0, 1: 0.0, 2: 0.5, 3: 0.5}
    iterations = dict.fromkeys(due, 0)
    groups = []
    while min(due.values(), default=math.inf) <= 1.5:
        pipeline = min(due, key=lambda i: (due[i], i))
        now = due.pop(pipeline)
        for group in policy.on(Ready(W(0, pipeline), iterations[pipeline]), now):
            groups.append((now, tuple(worker.pipeline for worker in group.members)))
            for worker in group.members:
                due[worker.pipeline] = now + 1
                iterations[worker.pipeline] += 1
    assert groups == [(0.0, (0, 1)), (0.5, (2, 3)), (1.5, (0, 2)), (1.5, (1, 3))]


def test_the_last_group_of_one_that_was_lost_does_not_count() -> None:
    """Pipelines 1 and 2 met last, so that 0 and 1 connect everybody; unless they did not, since 2 was lost."""
    for lost, reason in ((False, QUEUED), (True, Reason.ENFORCED)):
        policy = joined(PartialReduce, 2, 3, group_size=2, history=2)
        ready(policy, (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0))
        ready(policy, (0, 1, 1), (1, 1, 1), (0, 2, 0), (1, 2, 0))
        if lost:
            for event in (Lost(Worker(0, 2)), Lost(Worker(1, 2)), Joined(Worker(0, 2)), Joined(Worker(1, 2))):
                assert policy.on(event, 0.0) == []
        groups = ready(policy, (0, 0, 1), (1, 0, 1), (0, 1, 2), (1, 1, 2))
        assert brief(groups) == [(0, (0, 1), reason), (1, (0, 1), reason)]


@st.composite
def histories(draw: st.DrawFn) -> tuple[PartialReduce, Work]:
    stages, pipelines = draw(st.integers(1, 4)), draw(st.integers(2, 8))
    size, seed = draw(st.integers(2, pipelines)), draw(st.integers(0, 1 << 30))
    history = draw(st.none() | st.integers(fewest_groups(pipelines, size), 12))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "pipedream"]))
    slow = draw(
        st.sampled_from(
            [None, Delays(0.2, 5.0, "pass", seed=seed), Static([1 + 9 * uniform(seed, i) for i in range(7)])]
        )
    )
    work = Work(
        stages,
        pipelines,
        draw(st.integers(1, 10)),
        jittered(1.0, draw(st.sampled_from([0.0, 0.05, 0.9])), seed),
        schedule,
        num_micro_batches=1,
        heterogeneity=slow,
        exchange=lambda group: 0.1 * len(group.members),
    )
    return PartialReduce(size, draw(st.sampled_from([None, 0.5])), history=history), work


@settings(max_examples=HISTORIES, deadline=None)
@given(histories())
def test_nothing_gets_stuck_and_groups_are_the_same_in_every_stage(case: tuple[PartialReduce, Work]) -> None:
    config, work = case
    run = simulate(config, work)
    assert run.stuck == []
    by_stage = [
        [[worker.pipeline for worker in group.members] for _, group in run.groups if group.stage == stage]
        for stage in range(work.num_stages)
    ]
    assert all(groups == by_stage[0] for groups in by_stage)
    counts = numpy.bincount([pipeline for group in by_stage[0] for pipeline in group], minlength=work.num_pipelines)
    assert (counts == work.iterations).all()
    assert max(map(len, by_stage[0])) <= config.group_size
    if config.history is not None:
        assert_connected(run.entries, config.history, config.group_size)


def assert_connected(
    entries: list[tuple[float, Event, list[Decision]]], history: int, size: int, stage: int = 0
) -> None:
    """Each group has connected the last ``history`` ones, or joins as many components as it can."""
    graph = NaiveSyncGraph(history, "groups")
    present: dict[int, int] = {}
    for _, event, decisions in entries:
        match event:
            case Joined(worker):
                present[worker.pipeline] = present.get(worker.pipeline, 0) + 1
                if present[worker.pipeline] == 1:
                    graph.join(worker.pipeline)
            case Left(worker):
                present[worker.pipeline] -= 1
                if present[worker.pipeline] == 0:
                    graph.leave(worker.pipeline)
        for group in (group for group in decisions if group.stage == stage):
            assert len(group.members) == min(size, len(graph.active))
            if group.reason != Reason.ENFORCED:
                assert len(graph.components([group])) == 1
            else:
                assert len(graph.components([group])) < len(graph.components())
            graph.record([group])


def test_speeds_are_those_of_the_papers_idea() -> None:
    """One of eight devices is five times slower: all-reduce would run at a fifth of the others' speed."""
    slow = Work(1, 8, 200, jittered(0.1, 0.05), heterogeneity=Static([5.0] + [1.0] * 7))
    alone = sum(simulate(NoSync(), slow).rates(10))
    late = sum(simulate(PartialReduce(), slow).rates(10)) / alone
    assert late == pytest.approx(0.83, abs=0.04)
