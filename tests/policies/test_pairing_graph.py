"""PHD-PSGD's graph against its paper's example and worked numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.policies.pairing import draw, similarities
from lightning_sdpipe.policies.sync_graph import Matrix, mixing_radius

PAPERS = [[0, 0.5, 0.25, 0.25], [0.5, 0, 0.25, 0.25], [0.25, 0.25, 0, 0.5], [0.25, 0.25, 0.5, 0]]
EVEN = [[(i != j) / 3 for j in range(4)] for i in range(4)]
TIMES = [0.10, 0.11, 0.19, 0.21]


def meeting_probabilities(times: Sequence[float], gamma: float) -> Matrix:
    """P of groups that take ``times`` for a step, in any unit; its rows add up to 1, its diagonal is 0."""
    weights = [similarities(times, i, gamma) for i in range(len(times))]
    return [[weight / (sum(row) or 1.0) for weight in row] for row in weights]


def expected_mixing(probabilities: Matrix, rates: Sequence[float]) -> Matrix:
    """E[W] of meetings that groups draw by ``probabilities``, each as often as its rate; for :func:`mixing_radius`."""
    size, total = len(rates), sum(rates)
    mixing = [[float(i == j) for j in range(size)] for i in range(size)]
    for i in range(size):
        for j in range(i + 1, size):
            share = (rates[i] * probabilities[i][j] + rates[j] * probabilities[j][i]) / total
            mixing[i][j] = mixing[j][i] = share / 2
            mixing[i][i] -= share / 2
            mixing[j][j] -= share / 2
    return mixing


def radius(probabilities: list[list[float]], times: list[float]) -> float:
    return mixing_radius(expected_mixing(probabilities, [1 / t for t in times]))


def test_the_formula_gives_the_papers_example_exactly() -> None:
    assert meeting_probabilities([0.1, 0.1, 0.2, 0.2], 1.0) == PAPERS


def test_without_a_preference_all_are_drawn_alike() -> None:
    assert meeting_probabilities(TIMES, 0.0) == EVEN


def test_how_fast_the_papers_graph_mixes() -> None:
    assert radius(PAPERS, [1.0] * 4) == pytest.approx(0.75)
    assert radius(EVEN, [1.0] * 4) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("gamma", "expected"), [(0.0, 0.7189), (1.0, 0.7359), (2.0, 0.8011)])
def test_preferring_ones_own_speed_mixes_more_slowly(gamma: float, expected: float) -> None:
    assert radius(meeting_probabilities(TIMES, gamma), TIMES) == pytest.approx(expected, abs=5e-5)


def test_the_first_row_of_four_unlike_groups() -> None:
    assert meeting_probabilities(TIMES, 1.0)[0][1:] == pytest.approx([0.4756, 0.2753, 0.2491], abs=5e-5)


@given(times=st.lists(st.floats(0.01, 100), min_size=2, max_size=8), gamma=st.floats(0, 8))
def test_mixing_leaves_the_mean_where_it_is(times: list[float], gamma: float) -> None:
    mixing = expected_mixing(meeting_probabilities(times, gamma), [1 / t for t in times])
    for i, row in enumerate(mixing):
        assert sum(row) == pytest.approx(1)
        assert [column[i] for column in mixing] == pytest.approx(row)
        assert all(value >= -1e-12 for value in row)


def test_draws_fall_as_often_as_they_should() -> None:
    weights = list(enumerate(similarities([0.1, 0.1, 0.2, 0.2], 0, 1.0)))
    drawn = [draw(weights, k / 400) for k in range(400)]
    assert [drawn.count(k) for k in range(4)] == [0, 200, 100, 100]
    assert draw([(5, 1.0), (7, 0.0)], 1 - 1e-16) == 5
