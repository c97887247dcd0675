"""SDPipe's rules, one scripted story each: events and times in, whole lists of decisions out."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdpipe.heterogeneity import Static
from lightning_sdpipe.policies import Joined, Left, Lost, Ready, Reason, RefusedEvent, Tick, Worker
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized, SemiDecentralizedPolicy
from lightning_sdpipe.simulate import Work, jittered, simulate
from tests.policies.scripted import brief, joined, ready, straggling

W = Worker
CLOSED, EVERYBODY, ENFORCED = Reason.WINDOW_CLOSED, Reason.EVERYBODY_CAME, Reason.ENFORCED
BUSY, LOST = Reason.TOKEN_BUSY, Reason.WORKER_LOST


make = partial(joined, SemiDecentralized)


def test_a_window_gathers_those_that_come_in_time() -> None:
    policy = make(1, 3, window=1.0)
    assert policy.deadline() is None
    assert policy.on(Ready(W(0, 2), 1), 10.0) == []
    assert policy.deadline() == 11.0
    assert policy.on(Ready(W(0, 0), 1), 10.5) == []
    groups = policy.on(Tick(), 11.0)
    assert brief(groups) == [(0, (0, 2), CLOSED)]
    assert groups[0].weights == (0.5, 0.5)
    assert policy.deadline() is None


def test_a_worker_that_comes_when_the_window_has_ended_is_too_late() -> None:
    policy = make(1, 3, window=1.0)
    policy.on(Ready(W(0, 0), 1), 0.0)
    assert brief(policy.on(Ready(W(0, 1), 1), 1.0)) == [(0, (0,), CLOSED)]
    assert policy.deadline() == 2.0


def test_it_goes_out_at_once_when_everybody_came() -> None:
    policy = make(2, 2, window=1.0)
    policy.on(Ready(W(0, 0), 1), 0.0)
    policy.on(Ready(W(1, 0), 1), 0.0)
    assert brief(policy.on(Ready(W(0, 1), 1), 0.1)) == [(0, (0, 1), EVERYBODY)]
    assert policy.deadline() == 1.0


def test_an_unconnected_candidate_waits_until_it_connects_the_stage() -> None:
    policy = make(1, 4, window=1.0, connectivity=1)
    policy.on(Ready(W(0, 0), 1), 0.0)
    policy.on(Ready(W(0, 1), 1), 0.5)
    assert policy.on(Tick(), 1.0) == []
    assert policy.token_holder == 0
    assert policy.deadline() is None
    assert policy.on(Ready(W(0, 2), 1), 50.0) == []
    assert brief(policy.on(Ready(W(0, 3), 1), 60.0)) == [(0, (0, 1, 2, 3), ENFORCED)]
    assert policy.token_holder is None


def after_a_round_of_pairs() -> SemiDecentralizedPolicy:
    """Rounds of 4: {0,1} {2,3} met in round 1, so a bridge between the two is enough in round 2."""
    policy = make(1, 4, window=1.0, connectivity=2)
    for first, second, now in ((0, 1, 0.0), (2, 3, 2.0)):
        ready(policy, first, second, iteration=1, now=now)
        assert brief(policy.on(Tick(), now + 1)) == [(0, (first, second), CLOSED)]
    return policy


def test_enforcement_ends_as_soon_as_the_graph_is_connected() -> None:
    policy = after_a_round_of_pairs()
    ready(policy, 0, 1, iteration=2, now=4.0)
    assert policy.on(Tick(), 5.0) == []
    assert brief(policy.on(Ready(W(0, 3), 2), 9.0)) == [(0, (0, 1, 3), ENFORCED)]


def test_only_one_stage_enforces_at_a_time() -> None:
    """The example of SDPipe's figure 3: without the token both stages would wait for ever."""
    policy = make(2, 2, window=1.0, connectivity=1)
    policy.on(Ready(W(0, 1), 1), 0.0)
    policy.on(Ready(W(1, 0), 1), 0.5)
    assert policy.on(Tick(), 1.0) == []
    assert policy.token_holder == 0
    assert brief(policy.on(Tick(), 1.5)) == [(1, (0,), BUSY)]
    assert brief(policy.on(Ready(W(0, 0), 1), 2.0)) == [(0, (0, 1), ENFORCED)]
    assert policy.token_holder is None


def test_when_the_missing_worker_leaves_nobody_waits_for_it() -> None:
    policy = make(1, 3, window=1.0, connectivity=1)
    ready(policy, 0, 1, iteration=1)
    assert policy.on(Tick(), 1.0) == []
    assert brief(policy.on(Left(W(0, 2)), 5.0)) == [(0, (0, 1), LOST)]
    assert policy.token_holder is None


def test_when_the_last_missing_worker_leaves_an_open_window_ends() -> None:
    policy = make(1, 2, window=1.0)
    policy.on(Ready(W(0, 0), 1), 0.0)
    assert brief(policy.on(Left(W(0, 1)), 0.5)) == [(0, (0,), LOST)]
    assert policy.deadline() is None


def test_the_token_is_free_when_its_stage_can_no_longer_wait() -> None:
    policy = make(1, 3, window=1.0, connectivity=1)
    policy.on(Ready(W(0, 0), 1), 0.0)
    assert policy.on(Tick(), 1.0) == []
    assert policy.on(Left(W(0, 0)), 2.0) == []
    assert policy.token_holder is None
    assert policy.on(Ready(W(0, 1), 1), 3.0) == []
    assert policy.deadline() == 4.0


@pytest.mark.parametrize(
    ("worker", "iteration", "message"),
    [
        (W(0, 0), 1, "waits for an answer"),
        (W(0, 0), 2, "waits for an answer"),
        (W(0, 1), 0, "after 0"),
        (W(0, 2), 1, "without having joined"),
        (W(1, 0), 1, "does not exist"),
        (W(0, 4), 1, "does not exist"),
        (W(0, 3), -1, "reported iteration -1"),
    ],
)
def test_a_refused_ready_changes_nothing(worker: Worker, iteration: int, message: str) -> None:
    policy = make(1, 4, window=1.0)
    policy.on(Left(W(0, 2)), 0.0)
    policy.on(Ready(W(0, 1), 0), 0.0)
    policy.on(Tick(), 1.0)
    policy.on(Ready(W(0, 0), 1), 2.0)
    with pytest.raises(RefusedEvent, match=message):
        policy.on(Ready(worker, iteration), 100.0)
    assert policy.deadline() == 3.0, "not even the time was taken notice of"
    assert brief(policy.on(Tick(), 3.0)) == [(0, (0,), CLOSED)]


def test_the_window_doubles_after_small_groups_and_shrinks_after_large_ones() -> None:
    policy = make(1, 3, window=1.0)
    lengths = []
    for k in range(3):  # two of three come, at once: shrinks
        ready(policy, 0, 1, iteration=k, now=10.0 * k)
        lengths.append(policy.deadline() - 10.0 * k)
        policy.on(Tick(), 10.0 * k + 5)
    for k in range(3, 6):  # alone: doubles, up to the maximum
        policy.on(Ready(W(0, 0), k), 10.0 * k)
        lengths.append(policy.deadline() - 10.0 * k)
        policy.on(Tick(), 10.0 * k + 5)
    assert lengths == pytest.approx([1.0, 0.9, 0.81, 0.729, 1.0, 1.0])
    policy.on(Ready(W(0, 2), 6), 100.0)
    assert policy.deadline() == 101.0, "the window belongs to the worker that opens it"


def test_the_papers_window_is_up_to_one_nth_of_the_measured_iteration_time() -> None:
    policy = make(1, 4, window="paper", connectivity=None, min_group=3)
    policy.on(Ready(W(0, 0), 0), 0.0)
    assert policy.deadline() == 0.05, "no iteration has been measured"
    policy.on(Tick(), 0.05)  # alone, below min_group: doubled, which the maximum forbids
    policy.on(Ready(W(0, 0), 1), 4.05)  # an iteration takes 4 s
    assert policy.deadline() == pytest.approx(4.05 + 1.0)
    ready(policy, 1, 2, now=4.1)
    assert brief(policy.on(Tick(), 5.1)) == [(0, (0, 1, 2), CLOSED)]
    policy.on(Ready(W(0, 0), 2), 9.1)
    assert policy.deadline() == pytest.approx(9.1 + 0.9), "three came: 0.9 times as long"
    policy.on(Ready(W(0, 1), 1), 9.1)
    assert brief(policy.on(Tick(), 10.1)) == [(0, (0, 1), CLOSED)]
    policy.on(Ready(W(0, 0), 3), 14.1)
    assert policy.deadline() == pytest.approx(14.1 + 1.0), "two came: doubled, up to the maximum"


def test_p_may_count_groups_as_the_papers_text_does() -> None:
    """{0,1} meets again and again: after P groups the others have met nobody lately."""
    policies = {unit: make(1, 4, window=1.0, connectivity=3, connectivity_unit=unit) for unit in ("rounds", "groups")}
    reasons: dict[str, list[str]] = {unit: [] for unit in policies}
    for unit, policy in policies.items():
        for k in range(6):
            ready(policy, 0, 1, iteration=k, now=10.0 * k)
            groups = policy.on(Tick(), 10.0 * k + 1)
            if not groups:  # it enforces
                policy.on(Ready(W(0, 2), k), 10.0 * k + 2)
                groups = policy.on(Ready(W(0, 3), k), 10.0 * k + 3)
            reasons[unit] += [group.reason for group in groups]
    assert reasons["groups"] == [CLOSED, CLOSED, ENFORCED, CLOSED, CLOSED, ENFORCED]
    assert reasons["rounds"] == [CLOSED] * 4 + [ENFORCED, CLOSED], "a round of four signals is two such groups"


def test_the_last_group_of_one_that_was_lost_connects_nobody() -> None:
    policy = after_a_round_of_pairs()
    for event in (Lost(W(0, 3)), Joined(W(0, 3))):
        assert policy.on(event, 3.5) == []
    ready(policy, 0, 1, iteration=2, now=4.0)
    assert policy.on(Tick(), 5.0) == []
    assert policy.on(Ready(W(0, 3), 2), 9.0) == [], "3 has not met 2 after all"
    assert brief(policy.on(Ready(W(0, 2), 2), 9.5)) == [(0, (0, 1, 2, 3), ENFORCED)]


def test_who_is_enough_is_found_anew_when_one_is_lost_while_a_stage_waits() -> None:
    policy = after_a_round_of_pairs()
    policy.on(Ready(W(0, 0), 2), 4.0)
    assert policy.on(Tick(), 5.0) == []
    assert policy.token_holder == 0
    for event in (Lost(W(0, 1)), Joined(W(0, 1))):
        assert policy.on(event, 6.0) == []
    assert policy.on(Ready(W(0, 2), 2), 7.0) == [], "0 and 2 bridged the stage until 0 and 1 came apart"
    assert brief(policy.on(Ready(W(0, 1), 2), 8.0)) == [(0, (0, 1, 2), ENFORCED)]


def test_an_automatic_window_awaits_those_who_are_expected_soon() -> None:
    policy = make(1, 4, window="auto", connectivity=None)
    ready(policy, *range(4))
    policy.on(Ready(W(0, 3), 1), 2.0)  # an iteration takes 2 s: the others are due; the slack is 1/6 of a quarter
    assert policy.deadline() == pytest.approx(2.0 + 0.5 / 6)
    assert brief(policy.on(Tick(), 2.5)) == [(0, (3,), CLOSED)]
    assert brief(policy.on(Ready(W(0, 0), 1), 2.6)) == [(0, (0,), CLOSED)], "1 and 2 are late, 3 is due at 4.5"
    assert brief(policy.on(Ready(W(0, 1), 1), 4.5)) == []
    assert policy.deadline() == pytest.approx(2.6 + 2.6 + 1.125 / 6), "2.6 s is the median: 0 is due within 4.5 / 4 s"


def test_of_two_workers_out_of_step_only_the_later_one_waits_and_they_meet() -> None:
    policy = make(1, 2, window="auto", connectivity=None)
    ready(policy, *range(2))
    assert brief(policy.on(Ready(W(0, 0), 1), 1.0)) == []
    assert brief(policy.on(Tick(), 1.1)) == [(0, (0,), CLOSED)], "1 is late"
    assert brief(policy.on(Ready(W(0, 1), 1), 1.3)) == [(0, (1,), CLOSED)], "0 is due in 0.8, more than a quarter"
    assert brief(policy.on(Ready(W(0, 0), 2), 2.1)) == []
    assert brief(policy.on(Ready(W(0, 1), 2), 2.3)) == [(0, (0, 1), EVERYBODY)], "0 has waited for 1"


@pytest.mark.parametrize(("pipelines", "waits"), [(2, True), (16, True), (64, False)])
def test_an_automatic_window_looks_less_far_ahead_with_many_pipelines(pipelines: int, waits: bool) -> None:
    policy = make(1, pipelines, window="auto", connectivity=None)
    ready(policy, *range(pipelines))
    policy.on(Ready(W(0, 0), 1), 1.0)  # an iteration takes 1 s
    assert brief(policy.on(Tick(), 1.1)) == [(0, (0,), CLOSED)]
    policy.on(Ready(W(0, 1), 1), 1.8)  # 0 is due 0.3 s later
    assert (policy.deadline() is not None) == waits


def test_slow_workers_wait_for_fast_ones_and_seldom_train_alone() -> None:
    slow = Static((1.0, 1.0, 2.0, 4.0))
    run = simulate(SemiDecentralized(), Work(1, 4, 200, jittered(1.0, 0.05, seed=0), heterogeneity=slow))
    for number in (2, 3):
        sizes = [len(group.members) for _, group in run.groups if W(0, number) in group.members]
        assert sizes.count(1) / len(sizes) < 0.6
    bound = 1 + 1 + 1 / 2 + 1 / 4
    assert sum(run.rates(20)) / bound > 0.93


def test_where_candidates_are_split_few_workers_are_held_up_by_enforcement() -> None:
    enforced, answered = 0, 0
    for seed in range(3):
        run = simulate(SemiDecentralized(), straggling(2, 16, 60, seed))
        enforced += sum(len(group.members) for _, group in run.groups if group.reason == Reason.ENFORCED)
        answered += sum(len(group.members) for _, group in run.groups)
    assert enforced / answered < 0.02


def test_time_away_is_no_iteration() -> None:
    policy = make(1, 4, window="auto")
    ready(policy, *range(4))
    policy.on(Left(W(0, 3)), 1.0)
    policy.on(Joined(W(0, 3)), 1000.0)
    policy.on(Ready(W(0, 3), 1), 1001.0)
    assert policy.deadline() == pytest.approx(1001.05), "no iteration has been measured yet"


def test_many_pipelines_are_split_into_groups_of_about_four() -> None:
    policy = make(1, 10, window=1.0)
    groups = [group for i in range(10) for group in policy.on(Ready(W(0, i), 0), 0.0)]
    assert [len(group.members) for group in groups] == [4, 3, 3]
    assert {group.reason for group in groups} == {EVERYBODY}
    assert sorted(w.pipeline for g in groups for w in g.members) == list(range(10))


def test_a_split_that_would_not_connect_the_stage_goes_out_whole() -> None:
    policy = make(1, 4, window=1.0, connectivity=1, max_group=2)
    groups = [group for i in range(4) for group in policy.on(Ready(W(0, i), 0), 0.0)]
    assert brief(groups) == [(0, (0, 1, 2, 3), EVERYBODY)]


def test_t_0_is_local_sgd_but_for_what_is_enforced() -> None:
    for connectivity in (None, 4):
        run = simulate(SemiDecentralized(window=0.0, connectivity=connectivity), straggling(2, 5, 60, 0))
        enforced = [group for _, group in run.groups if group.reason in (ENFORCED, BUSY)]
        assert all(len(group.members) == 1 for _, group in run.groups if group not in enforced)
        assert any(len(group.members) > 1 for group in enforced) == (connectivity is not None)


@settings(max_examples=settings.default.max_examples // 4, deadline=None)
@given(
    stages=st.integers(1, 4),
    pipelines=st.integers(1, 9),
    seed=st.integers(0, 1 << 30),
    asynchronous=st.booleans(),
    connectivity=st.sampled_from([1, 2, 10, None]),
)
def test_t_infinity_is_all_reduce(
    stages: int, pipelines: int, seed: int, asynchronous: bool, connectivity: int | None
) -> None:
    work = straggling(stages, pipelines, 12, seed, asynchronous)
    runs = [
        simulate(c, work) for c in (SemiDecentralized(window=math.inf, connectivity=connectivity), AllReduceModels())
    ]
    assert [run.stuck for run in runs] == [[], []]
    assert runs[0].groups == runs[1].groups
    assert all(len(group.members) == pipelines for _, group in runs[0].groups)


def test_the_simulation_finds_the_deadlock_that_the_token_prevents() -> None:
    class WithoutToken(SemiDecentralizedPolicy):
        token_holder = property(lambda self: None, lambda self, holder: None)  # type: ignore[assignment]

    stuck = 0
    for seed in range(30):
        policy = WithoutToken(SemiDecentralized(window=0.1, connectivity=3), 3, 6)
        stuck += bool(simulate(policy, straggling(3, 6, 30, seed, probability=0.3)).stuck)
    assert stuck > 0
