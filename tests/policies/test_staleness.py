"""``staleness=`` of the methods that average in groups of pipelines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import Delays
from lightning_sdpipe.policies import Broken, Group, Left, Policy, Ready, Reason, Restarted, Tick, Worker
from lightning_sdpipe.policies.ad_psgd import ADPSGD, matching
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized, SemiDecentralizedPolicy
from lightning_sdpipe.simulate import Run, Work, jittered, simulate
from tests.policies.scripted import brief, join_all, straggling

W = Worker
CLOSED, EVERYBODY, STALENESS = Reason.WINDOW_CLOSED, Reason.EVERYBODY_CAME, Reason.STALENESS
EXCEEDED = Reason.STALENESS_EXCEEDED

bounded = st.one_of(
    st.builds(ADPSGD, seed=st.integers(0, 99), staleness=st.integers(1, 6)),
    st.builds(
        SemiDecentralized,
        window=st.sampled_from([0.0, 0.3, "auto", "paper"]),
        connectivity=st.sampled_from([None, 2, 10]),
        max_group=st.sampled_from([None, 2, 3]),
        staleness=st.integers(1, 6),
    ),
)


def made(config: ADPSGD | SemiDecentralized, stages: int, pipelines: int) -> Policy:
    policy = config.make_policy(stages, pipelines)
    join_all(policy, stages, pipelines)
    return policy


def ready(policy: Policy, *pipelines: int, iteration: int = 0, stage: int = 0, now: float = 0.0) -> list[Group]:
    return [group for p in pipelines for group in policy.on(Ready(W(stage, p), iteration), now)]


def largest_lag(run: Run) -> int:
    return max(lag for stage in range(run.work.num_stages) for _, lag in run.lags(stage))


@settings(max_examples=settings.default.max_examples // 4, deadline=None)
@given(
    config=bounded,
    stages=st.sampled_from([1, 1, 2, 4]),
    pipelines=st.integers(2, 8),
    without_flush=st.booleans(),
    probability=st.sampled_from([0.1, 0.3]),
    seed=st.integers(0, 1 << 30),
)
def test_nobody_is_stuck_and_what_is_not_kept_is_reported(
    config: ADPSGD | SemiDecentralized, stages: int, pipelines: int, without_flush: bool, probability: float, seed: int
) -> None:
    run = simulate(config, straggling(stages, pipelines, 15, seed, without_flush, probability=probability))
    assert run.stuck == []
    assert config.staleness is not None
    if largest_lag(run) > config.staleness:
        assert stages > 1, "with one stage the token is always free"
        assert isinstance(config, SemiDecentralized), "pairs are decided for all stages by the last one"
        assert run.reasons[EXCEEDED] > 0


def test_the_simulation_finds_the_deadlock_of_a_bound_without_the_token() -> None:
    class WithoutToken(SemiDecentralizedPolicy):
        token_holder = property(lambda self: None, lambda self, holder: None)  # type: ignore[assignment]

    config = SemiDecentralized(window=0.0, connectivity=None, staleness=2)
    works = [straggling(3, 6, 30, seed, probability=0.3) for seed in range(10)]
    assert any(simulate(WithoutToken(config, 3, 6), work).stuck for work in works)
    assert not any(simulate(config, work).stuck for work in works)


def test_a_candidate_waits_for_those_that_are_behind_its_members() -> None:
    policy = made(SemiDecentralized(window=1.0, connectivity=None, staleness=2), 1, 3)
    ready(policy, 0)
    assert brief(policy.on(Tick(), 1.0)) == [(0, (0,), CLOSED)]
    ready(policy, 0, 1, iteration=1, now=2.0)
    assert policy.on(Tick(), 3.0) == [], "2 lacks two steps of 0"
    assert brief(ready(policy, 2, now=9.0)) == [(0, (0, 1, 2), STALENESS)]


def test_what_is_late_for_the_bound_only_goes_out_whole_if_it_was_split_otherwise() -> None:
    policy = made(SemiDecentralized(window=1.0, connectivity=None, staleness=1, max_group=2), 1, 4)
    assert brief(ready(policy, 0, 1, 2, 3)) == [(0, (0, 1, 2, 3), EVERYBODY)]


def test_a_stage_without_the_token_goes_on_and_says_so() -> None:
    policy = made(SemiDecentralized(window=0.0, connectivity=None, staleness=1), 2, 2)
    assert ready(policy, 0, stage=0) == []
    assert brief(ready(policy, 0, stage=1)) == [(1, (0,), EXCEEDED)]
    assert brief(ready(policy, 1, stage=0)) == [(0, (0, 1), STALENESS)]


def test_who_leaves_is_behind_nobody() -> None:
    policy = made(SemiDecentralized(window=0.0, connectivity=None, staleness=1), 1, 3)
    ready(policy, 0, 1)
    assert brief(policy.on(Left(W(0, 2)), 1.0)) == [(0, (0, 1), Reason.WORKER_LOST)]


def test_a_pair_waits_for_those_that_are_behind_it() -> None:
    policy = made(ADPSGD(seed=0, staleness=1), 1, 4)
    partner = matching(4, 0, 0)[0]
    first, second = sorted({1, 2, 3} - {partner})
    assert ready(policy, 0, partner) == []
    assert ready(policy, first) == []
    assert brief(ready(policy, second)) == [(0, (0, 1, 2, 3), STALENESS)]


def test_other_stages_average_with_those_that_the_last_one_waited_for() -> None:
    policy = made(ADPSGD(seed=0, staleness=1), 2, 3)
    assert ready(policy, 0, 1, 2, stage=0) == []
    assert ready(policy, 0, 1, stage=1) == []
    assert brief(ready(policy, 2, stage=1)) == [(1, (0, 1, 2), STALENESS), (0, (0, 1, 2), STALENESS)]


@pytest.mark.parametrize("config", [ADPSGD(staleness=2), SemiDecentralized(window=0.0, staleness=2, connectivity=None)])
def test_what_broke_and_what_another_scheduler_knew_do_not_count(config: ADPSGD | SemiDecentralized) -> None:
    policy = made(config, 1, 2)
    groups = ready(policy, 0, 1)
    policy.on(Broken(groups[-1].sequence), 0.0)
    before = len(groups)
    groups += ready(policy, 0, iteration=1, now=1.0)
    assert len(groups) == before, "1 lacks two steps of 0"
    (meeting,) = ready(policy, 1, iteration=1, now=1.0)
    assert len(meeting.members) == 2
    policy.on(Restarted(50), 2.0)
    assert ready(policy, 0, iteration=2, now=3.0) == []
    assert brief(ready(policy, 1, iteration=2, now=3.0))[0][1] == (0, 1)


def test_a_bound_makes_models_newer_for_some_throughput() -> None:
    work = Work(1, 8, 150, jittered(1.0, 0.1), heterogeneity=Delays(0.1, 3.0, seed=1))
    free, kept = (simulate(SemiDecentralized(staleness=bound), work) for bound in (None, 3))
    assert largest_lag(kept) == 3 < largest_lag(free)
    assert 0.5 < kept.throughput / free.throughput <= 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ADPSGD(staleness=0), "staleness=0 is not allowed; give an integer from 1"),
        (lambda: SemiDecentralized(staleness=0), "staleness=0 is not allowed; give an integer from 1"),
        (lambda: ADPSGD(staleness=3, asynchronous=True), "staleness=3 cannot be kept with asynchronous=True"),
        (lambda: SemiDecentralized(staleness=3, window=float("inf")), "staleness=3 has no effect with window=inf"),
    ],
)
def test_bounds_that_cannot_be_are_refused(make: type[ADPSGD], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
