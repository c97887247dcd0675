"""The mixing matrix against its definition, and ρ against published values."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.policies.sync_graph import mean_mixing_matrix, mixing_radius


@given(
    n=st.integers(2, 6),
    groups=st.lists(st.dictionaries(st.integers(0, 5), st.floats(0.1, 9.0), min_size=1), min_size=1, max_size=6),
)
def test_the_matrix_does_to_models_what_groups_do(n: int, groups: list[dict[int, float]]) -> None:
    models = numpy.random.default_rng(0).normal(size=(n, 3))
    outcomes, weighted = [], []
    for group in groups:
        members = sorted(group)
        weights = [group[member] / sum(group.values()) for member in members]
        weighted.append((members, weights))
        after = models.copy()
        present = [(member, weight) for member, weight in zip(members, weights, strict=True) if member < n]
        for member, _ in present:
            after[member] += sum(weight * (models[other] - models[member]) for other, weight in present)
        outcomes.append(after)
    mean = numpy.array(mean_mixing_matrix(weighted, range(n)))
    numpy.testing.assert_allclose(mean @ models, numpy.mean(outcomes, axis=0), atol=1e-9)
    assert mixing_radius(mean.tolist()) <= 1 + 1e-6


@pytest.mark.parametrize(
    ("groups", "rho"),
    [
        ([[0, 1], [1, 2], [0, 2]], 0.5),  # P-Reduce, figure 4: equal speeds
        ([[0, 1], [0, 1], [1, 2], [0, 2]], 0.625),  # one worker is twice as slow
        ([[0, 1, 2]], 0.0),
        ([[0], [1], [2]], 1.0),
        ([], 1.0),
    ],
)
def test_rho_is_that_of_p_reduce(groups: list[list[int]], rho: float) -> None:
    equal = [(group, [1 / len(group)] * len(group)) for group in groups]
    assert mixing_radius(mean_mixing_matrix(equal, range(3))) == pytest.approx(rho, abs=1e-9)


def test_unequal_weights_have_a_rho_too() -> None:
    """Two workers, weights 3/4 and 1/4: the difference of the models becomes 0; half of the time nothing happens."""
    half = [([0, 1], [0.75, 0.25]), ([0], [1.0])]
    assert mixing_radius(mean_mixing_matrix(half, range(2))) == pytest.approx(0.5)
