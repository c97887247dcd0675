from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_sdpipe.exchange.payloads import TopK
from lightning_sdpipe.exchange.payloads.few_bits import SEGMENT


def through(payload: TopK, x: Tensor, residual: Tensor | None = None) -> Tensor:
    values = torch.empty_like(x)
    payload.decode(payload.message(x, residual), values)
    return values


def test_one_of_three_coordinates_with_feedback() -> None:
    x, residual, total = torch.tensor([3.0, 2.0, 1.0]), torch.zeros(3), torch.zeros(3)
    for _ in range(6):
        total += through(TopK(1 / 3), x, residual)
    assert total.tolist() == [15.0, 8.0, 6.0]
    assert residual.tolist() == [3.0, 4.0, 0.0]


def test_the_largest_of_each_segment() -> None:
    n = 2 * SEGMENT + 1000
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    x[:SEGMENT] *= 100
    came = through(TopK(0.01), x)
    for part, values in zip(x.split(SEGMENT), came.split(SEGMENT), strict=True):
        count = round(0.01 * len(part))
        kept = values != 0
        assert int(kept.sum()) == count
        assert torch.equal(values[kept], part[kept])
        assert part[kept].abs().min() >= part[~kept].abs().max()
    assert TopK(0.01).nbytes(n) == 6 * (2 * 655 + 10)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_the_error_is_at_most_what_random_ones_would_leave(x: list[float], density: float) -> None:
    values = torch.tensor(x)
    left = (values.double() - through(TopK(density), values)).square().sum()
    kept = max(1, round(density * len(x)))
    assert left <= (1 - kept / len(x)) * values.double().square().sum() * (1 + 1e-6)


@pytest.mark.parametrize("n", [1, 100, SEGMENT + 1])
def test_a_density_of_one_sends_everything(n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    assert torch.equal(through(TopK(1.0), x), x)
