import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.balance import balance

Problem = tuple[list[float], list[float], list[float]]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_blocks = draw(st.integers(1, 8))
    num_stages = draw(st.integers(1, num_blocks))
    whole = st.integers(0, 20).map(float)
    seconds = draw(st.lists(whole, min_size=num_blocks, max_size=num_blocks))
    crossing = draw(st.lists(whole, min_size=num_blocks - 1, max_size=num_blocks - 1))
    speeds = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=num_stages, max_size=num_stages))
    return seconds, crossing, speeds


def stage_times(problem: Problem, spans: tuple[range, ...]) -> list[float]:
    seconds, crossing, speeds = problem
    ends = [0.0, *crossing, 0.0]
    return [
        ends[span.start] + sum(seconds[block] for block in span) / speed + ends[span.stop]
        for span, speed in zip(spans, speeds, strict=True)
    ]


def every_cut(num_blocks: int, num_stages: int) -> list[tuple[range, ...]]:
    return [
        tuple(range(a, b) for a, b in zip((0, *at), (*at, num_blocks), strict=True))
        for at in combinations(range(1, num_blocks), num_stages - 1)
    ]


@given(problems())
def test_no_other_cut_has_a_faster_slowest_stage(problem: Problem) -> None:
    seconds, _, speeds = problem
    spans, slowest = balance(*problem)
    assert spans in every_cut(len(seconds), len(speeds))
    assert slowest == max(stage_times(problem, spans))
    assert slowest == min(max(stage_times(problem, cut)) for cut in every_cut(len(seconds), len(speeds)))


def test_a_device_of_half_the_speed_gets_half_the_work() -> None:
    spans, slowest = balance([1.0] * 9, [0.0] * 8, [1.0, 0.5])
    assert spans == (range(6), range(6, 9))
    assert slowest == 6.0


def test_a_wide_cut_is_avoided() -> None:
    assert balance([1.0] * 4, [0.0, 3.0, 0.1], [1.0, 1.0])[0] == (range(1), range(1, 4))


def test_a_cut_that_cannot_be_made_is_not() -> None:
    assert balance([1.0] * 4, [0.0, math.inf, math.inf], [1.0, 1.0])[0] == (range(1), range(1, 4))
    with pytest.raises(ConfigurationError, match="cannot travel"):
        balance([1.0] * 4, [math.inf, math.inf, 0.0], [1.0, 1.0, 1.0])


@pytest.mark.parametrize("speeds", [[1.0] * 3, [1.0, 0.0], [1.0, math.nan]])
def test_impossible_speeds_are_refused(speeds: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="2 blocks cannot be cut"):
        balance([1.0, 1.0], [0.0], speeds)
