"""PHD-PSGD's graph against its paper's example and worked numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_sdpipe.policies.pairing import draw, similarities
from lightning_sdpipe.policies.sync_graph import Matrix

PAPERS = [[0, 0.5, 0.25, 0.25], [0.5, 0, 0.25, 0.25], [0.25, 0.25, 0, 0.5], [0.25, 0.25, 0.5, 0]]
EVEN = [[(i != j) / 3 for j in range(4)] for i in range(4)]
TIMES = [0.10, 0.11, 0.19, 0.21]


def meeting_probabilities(times: Sequence[float], gamma: float) -> Matrix:
    """P of groups that take ``times`` for a step, in any unit; its rows add up to 1, its diagonal is 0."""
    weights = [similarities(times, i, gamma) for i in range(len(times))]
    return [[weight / (sum(row) or 1.0) for weight in row] for row in weights]


def test_the_formula_gives_the_papers_example_exactly() -> None:
    assert meeting_probabilities([0.1, 0.1, 0.2, 0.2], 1.0) == PAPERS


def test_without_a_preference_all_are_drawn_alike() -> None:
    assert meeting_probabilities(TIMES, 0.0) == EVEN


def test_the_first_row_of_four_unlike_groups() -> None:
    assert meeting_probabilities(TIMES, 1.0)[0][1:] == pytest.approx([0.4756, 0.2753, 0.2491], abs=5e-5)


def test_draws_fall_as_often_as_they_should() -> None:
    weights = list(enumerate(similarities([0.1, 0.1, 0.2, 0.2], 0, 1.0)))
    drawn = [draw(weights, k / 400) for k in range(400)]
    assert [drawn.count(k) for k in range(4)] == [0, 200, 100, 100]
    assert draw([(5, 1.0), (7, 0.0)], 1 - 1e-16) == 5
