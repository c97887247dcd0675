from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_sdpipe.exchange.payloads import OneBit


def through(payload: OneBit, x: Tensor) -> Tensor:
    values = torch.empty_like(x)
    payload.decode(payload.message(x), values)
    return values


def error(x: Tensor, values: Tensor) -> float:
    return float((x - values).square().sum() / x.square().sum())


def test_the_mean_magnitude_errs_less_than_the_root_mean_square() -> None:
    x = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    assert error(x, through(OneBit(), x)) == pytest.approx(1 - 2 / math.pi, abs=2e-3)  # 0.3634
    root_mean_square = x.sign() * x.view(-1, 4096).square().mean(1, keepdim=True).sqrt().expand(-1, 4096).reshape(-1)
    assert error(x, root_mean_square) == pytest.approx(0.4042, abs=2e-3)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=64))
def test_the_error_is_smaller_than_sending_nothing(x: list[float]) -> None:
    values = torch.tensor(x)
    came = through(OneBit(64), values)
    scale = values.abs().double().mean()
    squares = values.double().square().sum()
    left = squares - len(x) * scale**2
    rounding = 1e-12 * float(squares)  # of the scale, to single precision
    torch.testing.assert_close((values.double() - came).square().sum(), left, rtol=0, atol=rounding + 1e-30)
    assert torch.equal(came < 0, (values < 0) & (came != 0))


def test_a_block_with_one_value_among_zeros_is_no_expansion() -> None:
    x = torch.zeros(4096)
    x[7] = 1.0
    assert error(x, through(OneBit(), x)) < 1
    assert error(x, x.sign() / 64) == pytest.approx(
        1 - 2 / 64 + 1 / 4096
    )  # the root mean square, where zero has no sign
    signs = torch.where(x < 0, -1.0, 1.0) / 64
    assert error(x, signs) > 1


@pytest.mark.parametrize("n", [1, 7, 8, 9, 100, 4096, 5000])
def test_signs_are_packed_as_by_numpy(n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    codes = OneBit().message(x)[4 * -(-n // 4096) :]
    assert np.array_equal(codes.numpy(), np.packbits((x < 0).numpy(), bitorder="little"))


def test_negative_zero_is_no_negative_number() -> None:
    assert through(OneBit(8), torch.tensor([-0.0, 2.0])).tolist() == [1.0, 1.0]
