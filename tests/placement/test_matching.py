from __future__ import annotations

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.placement import matching
from lightning_sdpipe.placement.matching import bottleneck, shortest_path

costs = st.one_of(st.integers(0, 5).map(float), st.just(math.inf))


@st.composite
def squares(draw: st.DrawFn) -> list[list[float]]:
    size = draw(st.integers(1, 6))
    return draw(st.lists(st.lists(costs, min_size=size, max_size=size), min_size=size, max_size=size))


@st.composite
def distances(draw: st.DrawFn) -> list[list[float]]:
    size = draw(st.integers(1, 6))
    found = [[0.0] * size for _ in range(size)]
    for a in range(size):
        for b in range(a):
            found[a][b] = found[b][a] = draw(st.integers(0, 9).map(float))
    return found


@given(squares())
def test_no_other_matching_has_a_smaller_largest_cost(square: list[list[float]]) -> None:
    size = len(square)
    largest, columns = bottleneck(square)
    assert sorted(columns) == list(range(size))
    assert largest == max(square[row][column] for row, column in enumerate(columns))
    assert largest == min(max(square[row][column] for row, column in enumerate(each)) for each in permutations(columns))


@given(distances())
def test_no_other_order_is_shorter(square: list[list[float]]) -> None:
    length, order = shortest_path(square)
    assert sorted(order) == list(range(len(square)))
    assert length == sum(square[a][b] for a, b in pairwise(order))
    assert length == min(sum(square[a][b] for a, b in pairwise(other)) for other in permutations(range(len(square))))


def test_many_stages_are_ordered_nearly_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    points = np.random.default_rng(0).random((matching.EXACT_PATH, 2))
    square = np.linalg.norm(points[:, None] - points[None], axis=-1).tolist()
    exact, _ = shortest_path(square)
    monkeypatch.setattr(matching, "EXACT_PATH", 0)
    length, order = shortest_path(square)
    assert sorted(order) == list(range(len(square)))
    assert exact - 1e-9 <= length <= 1.05 * exact
    assert length == pytest.approx(sum(square[a][b] for a, b in pairwise(order)))
