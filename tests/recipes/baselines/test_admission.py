"""The parameter servers' rules, driven by arbitrary orders of events; and small examples worked out by hand."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.errors import ConfigurationError
from recipes.baselines.admission import Admission, AdmissionRule, BoundedStaleness, Verdict, admission


class Server:
    """The parameters as one number; every pipeline pulls as soon as it may."""

    def __init__(self, num_pipelines: int, rule: AdmissionRule) -> None:
        self.admission = admission(rule, num_pipelines)
        for pipeline in range(num_pipelines):
            self.admission.join(pipeline)
        self.parameter = self.round = Fraction(0)

    def push(self, pipeline: int, change: int) -> tuple[int, ...]:
        """Who goes on."""
        return self.take(self.admission.push(pipeline), change)

    def leave(self, pipeline: int, change: int | None) -> tuple[int, ...]:
        return self.take(self.admission.leave(pipeline, change is not None), change or 0)

    def take(self, verdict: Verdict, change: int) -> tuple[int, ...]:
        self.round += exact(verdict.weight) * change
        if verdict.closes is not None:
            self.parameter += exact(verdict.closes) * self.round
            self.round = Fraction(0)
        for released in verdict.released:
            self.admission.pull(released)
        return verdict.released


def exact(weight: float) -> Fraction:
    return Fraction(weight).limit_denominator(1000)


def test_backup_workers_drop_what_is_late() -> None:
    server = Server(3, AdmissionRule(quorum=2))
    assert [server.push(0, 1), server.push(1, 2)] == [(), (0, 1)]
    assert server.parameter == Fraction(3, 2)
    assert server.push(2, 6) == (2,)
    assert (server.parameter, server.round) == (Fraction(3, 2), 0)


def test_eager_reduce_carries_it_into_the_next_round() -> None:
    server = Server(3, AdmissionRule(quorum=2, late="carry"))
    assert [server.push(0, 1), server.push(1, 2)] == [(), (0, 1)]
    assert server.parameter == 1
    assert server.push(2, 6) == (2,), "it goes on at once, and counts for no quorum"
    assert (server.parameter, server.round) == (1, 6)
    assert [server.push(2, 3), server.push(0, 0)] == [(), (2, 0)]
    assert server.parameter == 1 + Fraction(6 + 3, 3)


def test_inverse_staleness_counts_the_clocks_of_the_furthest() -> None:
    server = Server(2, AdmissionRule(staleness=None, weights="inverse_staleness", combine="sum"))
    for _ in range(5):
        assert server.push(0, 1) == (0,)
    assert server.parameter == 5, "who is ahead is never stale"
    server.push(1, 10)
    assert server.parameter == 5 + Fraction(10, 5)
    server.push(1, 10)
    assert server.parameter == 7 + 10, "it has pulled in between"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quorum": 0}, "quorum=0.*from 1"),
        ({"staleness": -1}, "staleness=-1.*from 0"),
        ({"late": "wait"}, """late='wait' is not allowed; give "drop" or "carry\""""),
        ({"weights": "staleness"}, "weights='staleness'.*inverse_staleness"),
        ({"combine": "max"}, "combine='max'"),
        ({"quorum": 2, "staleness": 1}, "staleness=1 contradicts quorum=2.*leave one"),
        ({"quorum": 2, "staleness": None}, "staleness=None contradicts quorum=2"),
        ({"late": "carry"}, "no effect without a quorum"),
        ({"weights": "inverse_staleness"}, "no effect with staleness=0"),
    ],
)
def test_values_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AdmissionRule(**options)


rules = st.one_of(
    st.builds(AdmissionRule, staleness=st.none() | st.integers(0, 3), combine=st.sampled_from(["mean", "sum"])),
    st.builds(AdmissionRule, staleness=st.none() | st.integers(1, 3), weights=st.just("inverse_staleness")),
    st.builds(AdmissionRule, quorum=st.integers(1, 2), late=st.sampled_from(["drop", "carry"])),
)


@given(st.data(), rules, st.integers(2, 5))
def test_somebody_can_always_go_on_and_no_push_counts_twice(
    data: st.DataObject, rule: AdmissionRule, pipelines: int
) -> None:
    server = Server(pipelines, rule)
    followed = server.admission
    pushed = 0
    while followed.active and data.draw(st.integers(0, 30), label="go on"):
        computing = sorted(p for p in followed.active if not followed.waits(p))
        assert computing, "a deadlock"
        pipeline = data.draw(st.sampled_from(computing))
        leaves = data.draw(st.integers(0, 9)) == 0
        released = server.leave(pipeline, 1) if leaves else server.push(pipeline, 1)
        pushed += 1
        assert_bounded(followed, rule)
        for other in followed.active:
            assert not (followed.waits(other) and not followed.awaited_by(other))
            assert followed.waits(other) or other != pipeline or other in released
    for pipeline in [p for p in followed.active if not followed.waits(p)]:
        server.leave(pipeline, None)
    for pipeline in sorted(followed.active):
        assert not followed.waits(pipeline), "it waits for those that have left"
        server.leave(pipeline, None)
    if rule.combine == "sum" and rule.weights == "equal" and rule.quorum is None:
        assert server.parameter == pushed
    if rule.late == "carry":
        assert server.parameter == Fraction(pushed, pipelines)
    assert server.parameter <= pushed
    assert server.round == 0


def assert_bounded(followed: Admission, rule: AdmissionRule) -> None:
    if isinstance(followed, BoundedStaleness) and rule.staleness is not None and followed.active:
        finished = [followed.finished(p) for p in followed.active]
        able = [followed.finished(p) for p in followed.active if not followed.waits(p)]
        assert max(able) - min(finished) <= rule.staleness
        assert max(finished) - min(finished) <= rule.staleness + 1


@given(st.integers(2, 5), st.integers(0, 4))
def test_the_fastest_gets_exactly_s_clocks_ahead_and_knows_whom_it_waits_for(pipelines: int, staleness: int) -> None:
    server = Server(pipelines, AdmissionRule(staleness=staleness))
    for _ in range(staleness):
        assert server.push(0, 1) == (0,)
    assert server.push(0, 1) == ()
    assert server.admission.awaited_by(0) == list(range(1, pipelines))
    with pytest.raises(ValueError, match="pipeline 0 may not go on yet"):
        server.admission.push(0)
    released = [server.push(pipeline, 1) for pipeline in range(1, pipelines)]
    assert 0 in released[-1]
    assert not any(0 in earlier for earlier in released[:-1])
