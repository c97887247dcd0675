"""The clocks of stale synchronous training, driven by arbitrary orders of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies.ssp_clocks import SSPClocks


def clocks_of(pipelines: int, staleness: int) -> SSPClocks:
    clocks = SSPClocks(staleness)
    for pipeline in range(pipelines):
        clocks.join(pipeline)
    return clocks


@given(st.data(), st.integers(1, 6), st.integers(0, 4))
def test_nobody_works_more_than_s_clocks_ahead_and_somebody_can_always_go_on(
    data: st.DataObject, pipelines: int, staleness: int
) -> None:
    clocks = clocks_of(pipelines, staleness)
    for _ in range(data.draw(st.integers(0, 60))):
        active = sorted(clocks.active)
        if not active:
            break
        able = [p for p in active if clocks.may_go_on(p)]
        assert able, "a deadlock"
        # who works now works in the clock that follows those it has finished
        least = min(clocks.finished(p) for p in active)
        assert all(clocks.finished(p) - least <= staleness for p in able)
        assert all(clocks.finished(p) - least <= staleness + 1 for p in active)
        pipeline = data.draw(st.sampled_from(able))
        if data.draw(st.integers(0, 9)) == 0:
            clocks.leave(pipeline)
        else:
            clocks.finish(pipeline)


@given(st.integers(2, 5), st.integers(0, 4))
def test_the_fastest_gets_exactly_s_clocks_ahead_and_knows_whom_it_waits_for(pipelines: int, staleness: int) -> None:
    clocks = clocks_of(pipelines, staleness)
    for done in range(staleness + 1):
        assert clocks.may_go_on(0), done
        clocks.finish(0)
    assert clocks.awaited_by(0) == list(range(1, pipelines))
    with pytest.raises(ValueError, match="not allowed to begin"):
        clocks.finish(0)
    for pipeline in range(1, pipelines):
        assert not clocks.may_go_on(0)
        clocks.finish(pipeline)
    assert clocks.may_go_on(0)


def test_nobody_waits_for_one_that_left() -> None:
    clocks = clocks_of(2, 0)
    clocks.finish(0)
    assert clocks.awaited_by(0) == [1]
    clocks.leave(1)
    assert clocks.may_go_on(0)
    assert clocks.active == {0}


def test_one_that_joins_later_starts_level_with_the_last() -> None:
    clocks = clocks_of(2, 3)
    clocks.finish(0)
    clocks.finish(0)
    clocks.finish(1)
    clocks.join(2)
    assert clocks.finished(2) == 1
    with pytest.raises(ValueError, match="joined twice"):
        clocks.join(2)


def test_negative_staleness_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="staleness=-1"):
        SSPClocks(-1)
