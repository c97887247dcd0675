"""Pipelines under a virtual clock: times that follow from formulas, and what a wrong policy does to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import Delays, Static, Trace
from lightning_sdpipe.policies import Decision, Event, Group, Joined, Left, Progress, Ready, Worker
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.built_in import POLICIES
from lightning_sdpipe.policies.decisions import BrokenRule
from lightning_sdpipe.policies.local_sgd import LocalSGDPolicy, NoSync
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.simulate import Work, jittered, simulate


@settings(max_examples=settings.default.max_examples // 5, deadline=None)
@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 8), schedule=st.sampled_from(["1f1b", "gpipe"]))
def test_a_flush_costs_its_bubble(stages: int, micro_batches: int, schedule: str) -> None:
    work = Work(stages, 2, 5, 3.0, schedule, micro_batches)  # type: ignore[arg-type]
    run = simulate(NoSync(), work)
    assert run.seconds == pytest.approx(5 * 3.0 * (micro_batches + stages - 1) / micro_batches)


def test_without_a_flush_only_filling_and_draining_cost() -> None:
    """The last stage computes without a gap from its first input on; its last gradient passes the stages before."""
    run = simulate(NoSync(), Work(4, 1, 50, 3.0, "pipedream"))
    assert run.seconds == pytest.approx(50 * 3.0 + 3 * 1.0 + 3 * 2.0)


def test_slow_devices_take_as_long_as_their_track_says() -> None:
    run = simulate(NoSync(), Work(1, 4, 10, 1.0, heterogeneity=Static((1.0, 1.0, 1.0, 2.0))))
    assert [run.finished[Worker(0, i)] for i in range(4)] == [10.0, 10.0, 10.0, 20.0]
    assert run.throughput == pytest.approx(3.5)
    traced = simulate(NoSync(), Work(1, 2, 100, 0.1, heterogeneity=Trace()))
    assert traced.seconds > 10.0
    assert traced.finished[Worker(0, 0)] != traced.finished[Worker(0, 1)]


def test_stragglers_cost_what_the_papers_arithmetic_says() -> None:
    """A flush loses the delay of its slowest worker: of its pipeline's, or under all-reduce of all. A little hides in
    the pipeline's filling and draining."""
    computing, delay = 0.1, 0.3
    work = Work(4, 4, 600, computing * 4 / 7, num_micro_batches=4, heterogeneity=Delays(0.1, delay, seed=1))
    for policy, workers in ((NoSync(), 4), (AllReduceModels(), 16)):
        expected = 4 / (computing + delay * (1 - 0.9**workers))
        assert simulate(policy, work).throughput == pytest.approx(expected, rel=0.08)


def test_rates_may_leave_the_first_mini_batches_out() -> None:
    """The first two take twice as long."""
    run = simulate(NoSync(), Work(1, 2, 10, lambda worker, k: (2.0 if k < 2 else 1.0) * (1 + worker.pipeline)))
    assert run.rates() == [pytest.approx(10 / 12), pytest.approx(10 / 24)]
    assert run.rates(first=2) == [pytest.approx(1.0), pytest.approx(0.5)]


def test_the_same_arguments_give_the_same_run() -> None:
    work = Work(3, 5, 40, jittered(1.0, 0.2, seed=3), heterogeneity=Delays(0.2, 2.0, seed=3))
    runs = [simulate(SemiDecentralized(), work) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].entries != simulate(SemiDecentralized(), replace(work, seconds=jittered(1.0, 0.2, seed=4))).entries


def test_a_group_waits_for_its_last_member_and_for_the_exchange() -> None:
    """Worker 0 takes 3 s, worker 1 takes 6 s; ready comes after the forward, a third of that, and ¾ of the backward."""
    work = Work(1, 2, 2, lambda worker, _: 3.0 * (1 + worker.pipeline), exchange=lambda group: 0.5)
    run = simulate(AllReduceModels(), work)
    assert [at for at, _ in run.groups] == [5.0, 11.5]
    assert run.finished == {Worker(0, 0): 13.0, Worker(0, 1): 13.0}
    assert run.waited == {Worker(0, 0): 7.0, Worker(0, 1): 1.0}
    late = simulate(AllReduceModels(), replace(work, announce="late"))
    assert [at for at, _ in late.groups] == [6.0, 12.5]


def test_a_neighbour_that_goes_on_computing_is_not_held_up() -> None:
    work = Work(1, 2, 5, lambda worker, _: 1.0 + 9.0 * worker.pipeline)
    run = simulate(ADPSGD(asynchronous=True), work)
    assert run.finished == {Worker(0, 0): 5.0, Worker(0, 1): 50.0}
    assert all(group.passive for at, group in run.groups if at < 5.0)


def test_what_happened_is_told_as_events() -> None:
    run = simulate(NoSync(), Work(1, 1, 2, 3.0))
    w = Worker(0, 0)
    assert [(at, event) for at, event, _ in run.entries] == [
        (0.0, Joined(w)),
        (2.5, Ready(w, 0)),
        (3.0, Progress(w, 0, 1, 3.0, 0.0)),
        (5.5, Ready(w, 1)),
        (6.0, Progress(w, 1, 1, 3.0, 0.0)),
        (6.0, Left(w)),
    ]


class Wrong(LocalSGDPolicy):
    """Answers as no policy may."""

    def __init__(self, mistake: str) -> None:
        super().__init__(1, 2, every=None)
        self.mistake = mistake

    def on(self, event: Event, now: float) -> list[Decision]:
        decisions = super().on(event, now)
        if not decisions:
            return decisions
        (group,) = decisions
        members = (Worker(0, 0), Worker(0, 1))
        return {
            "weights": [Group(group.members, (0.9,), group.sequence, "wrong")],
            "members": [Group(members[::-1], (0.5, 0.5), group.sequence, "wrong")],
            "number": [Group(group.members, (1.0,), group.sequence - 1, "wrong")],
            "twice": [group, Group(group.members, (1.0,), group.sequence + 1, "wrong")],
            "all passive": [Group(group.members, (1.0,), group.sequence, "wrong", passive=group.members)],
            "nobody": [],
        }[self.mistake]


@pytest.mark.parametrize("mistake", ["weights", "members", "number", "twice", "all passive"])
def test_decisions_that_cannot_be_carried_out_are_refused(mistake: str) -> None:
    with pytest.raises(BrokenRule, match=r"cannot go out|does not wait for a group"):
        simulate(Wrong(mistake), Work(1, 2, 3))


def test_who_is_never_answered_is_stuck() -> None:
    run = simulate(Wrong("nobody"), Work(1, 2, 3))
    assert run.stuck == [Worker(0, 0), Worker(0, 1)]
    assert run.throughput == 0.0


@pytest.mark.parametrize("kind", POLICIES)
def test_every_policy_runs_to_the_end_or_is_refused(kind: type[PolicyConfig]) -> None:
    for form in kind.forms:
        config, work = kind(**form), Work(2, 4, 6, jittered(1.0, 0.2))
        if config.rounds_are_apart:
            with pytest.raises(ConfigurationError, match=r"its pipelines train on .* take 'no_sync'"):
                simulate(config, work)
        else:
            assert simulate(config, work).stuck == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pipelines": 0}, "num_pipelines=0"),
        ({"announce": "never"}, "announce='never'"),
        ({"schedule": "zero_bubble"}, "schedule='zero_bubble' is not allowed; give one of '1f1b'"),
        ({"schedule": "pipedream", "num_micro_batches": 2}, "splits no mini-batch"),
    ],
)
def test_work_that_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        simulate(NoSync(), Work(**{"num_stages": 1, "num_pipelines": 1, "iterations": 1, **options}))  # type: ignore[arg-type]
