from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_sdpipe.exchange.ring_mean import NeighbourCopies, average, weight_of_each
from lightning_sdpipe.policies import pairing
from lightning_sdpipe.policies.sync_graph import mixing_radius


def matrix(size: int) -> list[list[float]]:
    weight = weight_of_each(size)
    rows = [[weight if other in pairing.ring(place, size) else 0.0 for other in range(size)] for place in range(size)]
    for place, row in enumerate(rows):
        row[place] = 1 - sum(row)
    return rows


@pytest.mark.parametrize(("size", "rho"), [(1, 0), (2, 0), (3, 0), (4, 1 / 3), (8, 0.8047), (16, 0.9493)])
def test_rings_mix_as_their_matrices_say(size: int, rho: float) -> None:
    assert mixing_radius(matrix(size)) == pytest.approx(rho, abs=5e-5)
    models = [torch.randn(7, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(size)]
    expected = torch.tensor(matrix(size), dtype=torch.float64) @ torch.stack(models)
    before = [x.clone() for x in models]
    for place, x in enumerate(models):
        average(x, [before[other] for other in pairing.ring(place, size)], weight_of_each(size))
    torch.testing.assert_close(torch.stack(models), expected)


def test_models_of_sixteen_bits_are_averaged_in_float32() -> None:
    x = torch.full((4,), 1.0, dtype=torch.bfloat16)
    average(x, [torch.full((4,), 1.0 + 2**-7, dtype=torch.bfloat16)] * 2, 1 / 3)
    assert torch.equal(x, torch.full((4,), 1.0 + 2**-7, dtype=torch.bfloat16))
    replicas = NeighbourCopies(x, {1: x}, 0.5)
    assert replicas.difference(x).dtype == torch.float32


def test_difference_is_the_formula_for_two() -> None:
    own, other, x = (torch.randn(5, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(3))
    z: Tensor = NeighbourCopies(own, {1: other}, weight_of_each(2)).difference(x)
    torch.testing.assert_close(z, x + other / 2 - 3 * own / 2)
    z = NeighbourCopies(own, {1: other, 2: x}, weight_of_each(5)).difference(x)
    torch.testing.assert_close(z, x + other / 3 + x / 3 - 5 * own / 3)
