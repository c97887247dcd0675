from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.exchange.payloads import Full, Half


def through(payload: Full | Half, x: torch.Tensor) -> torch.Tensor:
    values = torch.empty_like(x)
    payload.decode(payload.message(x), values)
    return values


@given(st.lists(st.floats(width=32), max_size=20))
def test_full_precision_keeps_every_bit(x: list[float]) -> None:
    values = torch.tensor(x, dtype=torch.float32)
    assert torch.equal(through(Full(), values).view(torch.int32), values.view(torch.int32))


@given(st.floats(2**-14, 65504.0, width=32) | st.floats(-65504.0, -(2**-14), width=32))
def test_sixteen_bits_err_by_their_last_one(x: float) -> None:
    value = torch.tensor([x])
    assert (through(Half(), value) - value).abs() <= 2**-11 * value.abs()
    assert (through(Half("bfloat16"), value) - value).abs() <= 2**-8 * value.abs()


def test_out_of_range_is_infinite_or_zero() -> None:
    x = torch.tensor([65504.0, 65519.0, 65520.0, -1e6, 2e-8, -1e-7])
    assert through(Half(), x).tolist() == [
        65504.0,
        65504.0,
        torch.inf,
        -torch.inf,
        0.0,
        pytest.approx(-1.19e-7, rel=0.01),
    ]
    assert through(Half("bfloat16"), x).isfinite().all()


def test_what_overflows_leaves_the_residual_alone() -> None:
    x, residual = torch.tensor([1.0, 1e6]), torch.tensor([2.0**-12, 3.0])
    Half().message(x, residual)
    assert residual.tolist() == [2.0**-12, 3.0]


def test_buffers_of_sixteen_bits_travel_as_they_are() -> None:
    assert Half().on(torch.bfloat16) == Half("bfloat16")
    assert Half("bfloat16").on(torch.float16) == Half()
    assert Half("bfloat16").on(torch.float64) == Half("bfloat16")
    assert Full().on(torch.bfloat16).nbytes(5) == 10
