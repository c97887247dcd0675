import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.balance import CLOSE, FAR, MUCH, Memory, balance, even

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


def test_a_cut_that_cannot_be_made_is_not() -> None:
    assert balance([1.0] * 4, [0.0, math.inf, math.inf], [1.0, 1.0])[0] == (range(1), range(1, 4))
    with pytest.raises(ConfigurationError, match="cannot travel"):
        balance([1.0] * 4, [math.inf, math.inf, 0.0], [1.0, 1.0, 1.0])


def memory(available: list[float], held: float = 1.0) -> Memory:
    """Of nine blocks of 2 bytes that keep ``held`` of each micro-batch; M − j are in flight, with a copy of 1 each."""
    stages = len(available)
    ahead = list(range(stages, 0, -1))
    return Memory(available, [2.0] * 9, [held] * 9, ahead, [1.0] * 9, [*ahead[:-1], 0])


@given(st.lists(st.integers(5, 60).map(float), min_size=2, max_size=4), st.sampled_from([0.0, 1.0, 2.0]))
def test_of_the_cuts_that_fit_none_has_a_faster_slowest_stage(available: list[float], held: float) -> None:
    limits, crossing = memory(available, held), [0.0, 3.0, 0.5] * 2 + [0.0, 0.0]
    slowness = [1.0, 4.0, 2.0][: len(available) - 1]
    speeds = [1.0, 0.5, 2.0, 1.0][: len(available)]

    def slowest(cut: tuple[range, ...]) -> float:
        ends = [0.0, *crossing, 0.0]
        links = [0.0, *slowness, 0.0]
        return max(
            links[stage] * ends[span.start] + len(span) / speeds[stage] + links[stage + 1] * ends[span.stop]
            for stage, span in enumerate(cut)
        )

    cuts = every_cut(9, len(available))
    fitting = [slowest(cut) for cut in cuts if limits.overflow(cut)[1] <= 0]
    if fitting:
        spans, found = balance([1.0] * 9, crossing, speeds, limits, slowness)
        assert limits.overflow(spans)[1] <= 0
        assert found == pytest.approx(slowest(spans)) == pytest.approx(min(fitting))
    else:
        least = min(limits.overflow(cut)[1] for cut in cuts)
        with pytest.raises(ConfigurationError, match=f"{least:.0f} bytes too much"):
            balance([1.0] * 9, crossing, speeds, limits, slowness)


def test_the_stage_that_does_not_fit_is_named() -> None:
    gib = 2.0**30
    tight = Memory([4 * gib, gib], [gib] * 9, [0.0] * 9, [2, 1], [0.0] * 9, [0, 0])
    with pytest.raises(ConfigurationError) as caught:
        balance([1.0] * 9, [0.0] * 8, [1.0, 1.0], tight)
    assert "At best that is stage 0 (blocks 0 to 5), which needs 6.00 GiB where there are 4.00 GiB: 2.00 GiB" in str(
        caught.value
    )
    with pytest.raises(ConfigurationError, match="memory of a device must be above 0"):
        memory([1.0, 0.0])


@pytest.mark.parametrize("speeds", [[1.0] * 3, [1.0, 0.0], [1.0, math.nan]])
def test_impossible_speeds_are_refused(speeds: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="2 blocks cannot be cut"):
        balance([1.0, 1.0], [0.0], speeds)


@given(problems(), st.data())
def test_an_even_cut_gives_up_little_time(problem: Problem, data: st.DataObject) -> None:
    seconds, crossing, speeds = problem
    num_stages, n = len(speeds), len(seconds)
    held = data.draw(st.lists(st.integers(0, 20).map(float), min_size=n, max_size=n))
    possible = [each < 15 for each in crossing]
    memory = data.draw(st.sampled_from([math.inf, 15.0, 30.0]))

    def slowest(spans: tuple[range, ...]) -> float:
        return max(sum(seconds[block] for block in span) for span in spans)

    def largest(spans: tuple[range, ...]) -> float:
        return max(sum(held[block] for block in span) for span in spans)

    cuts = [cut for cut in every_cut(n, num_stages) if all(possible[span.stop - 1] for span in cut[:-1])]
    spans, rating = even(seconds, held, num_stages, possible, memory)
    if not cuts:
        assert math.isinf(rating)
        return
    assert spans in cuts
    fitting = [cut for cut in cuts if largest(cut) <= memory]
    if not fitting:
        assert largest(spans) == min(map(largest, cuts))
        return
    much = MUCH * sum(held) / num_stages
    least = min(map(slowest, fitting))
    near, far = (min(largest(cut) for cut in fitting if slowest(cut) <= slack * least + 1e-9) for slack in (CLOSE, FAR))
    assert largest(spans) == (far if near > much and far <= much else near)
    assert slowest(spans) <= (FAR if near > much else CLOSE) * least + 1e-9
    assert rating == pytest.approx(slowest(spans) * (FAR if largest(spans) > much else 1))
