from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_sdpipe.exchange.payloads import EightBit
from lightning_sdpipe.exchange.payloads.eight_bit import TABLE, Dither, table

BLOCK = 16
NEAREST, STOCHASTIC = EightBit(BLOCK), EightBit(BLOCK, rounding="stochastic")


def through(payload: EightBit, x: Tensor, draw: int = 0) -> Tensor:
    values = torch.empty_like(x)
    payload.decode(payload.message(x, draw=draw), values)
    return values


def step(x: Tensor) -> float:
    """s, of one block."""
    return float((x.double().amax() - x.double().amin()) / 255) * (1 + 2**-19)


def resolution(x: Tensor) -> float:
    """What float32 itself cannot do better."""
    return float(2**-22 * x.double().abs().amax()) + 2e-38


extreme = st.floats(width=32, min_value=-(2.0**126), max_value=2.0**126, allow_subnormal=True)
close = st.tuples(extreme, st.lists(st.integers(-300, 300), min_size=1, max_size=BLOCK)).map(
    lambda drawn: [drawn[0] * (1 + k * 2**-23) for k in drawn[1]]  # which differ in their last bits
)
lists = st.one_of(st.lists(extreme, min_size=1, max_size=BLOCK), close)


@given(lists)
def test_the_nearest_of_256_levels_is_at_most_half_a_step_away(x: list[float]) -> None:
    values = torch.tensor(x)
    assert (through(NEAREST, values) - values).abs().max() <= step(values) / 2 + resolution(values)


@given(lists, st.integers(0, 1000))
def test_stochastic_rounding_never_leaves_the_levels_beside_a_value(x: list[float], draw: int) -> None:
    values = torch.tensor(x)
    assert (through(STOCHASTIC, values, draw) - values).abs().max() <= step(values) + resolution(values)


@given(extreme, st.integers(1, 3 * BLOCK), st.integers(0, 1000))
def test_equal_values_arrive_exactly(value: float, n: int, draw: int) -> None:
    values = torch.full((n,), value)
    assert torch.equal(through(NEAREST, values), values)
    assert torch.equal(through(STOCHASTIC, values, draw), values)


@pytest.mark.parametrize("offset", [0.0, 1.0, -1000.0])
def test_the_ends_of_a_block_have_the_codes_at_the_ends(offset: float) -> None:
    x = offset + torch.linspace(-1, 1, 4096)
    message = EightBit().message(x)
    codes = message[8:].view(torch.int8)
    assert (codes[0], codes[-1]) == (-128, 127)
    assert (codes.int().diff() >= 0).all()


def test_rounding_is_unbiased_over_the_table_and_so_is_its_place() -> None:
    y = torch.cat([torch.rand(16, generator=torch.Generator().manual_seed(0)) * 254 - 127, torch.tensor([0.5, 3.0])])
    noise = table(torch.device("cpu"))[:TABLE]
    bias = torch.stack([(value + noise).round_().double().mean() - value for value in y])
    assert bias.abs().max() < 2**-15
    assert noise.abs().max() < 0.5
    assert noise.unique(return_counts=True)[1].tolist() == [4] * (TABLE // 4)
    begins = torch.stack([_noise(draw) for draw in range(500)])
    assert begins.mean() == pytest.approx(0, abs=4 / (12 * 500) ** 0.5)
    assert begins.var() == pytest.approx(1 / 12, rel=0.2)


def _noise(draw: int) -> Tensor:
    y = torch.zeros(1)
    Dither(draw, y.device).add_to(y)
    return y


def test_stochastic_rounding_is_unbiased_with_the_variance_of_its_steps() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    draws, payload = 300, EightBit(rounding="stochastic")
    came = torch.stack([through(payload, x, draw) for draw in range(draws)]).double()
    s = step(x)
    variance = came.var(0)
    assert (came.mean(0) - x).abs().max() < 5 * 0.5 * s / draws**0.5
    assert variance.max() < s**2 / 4 * (1 + 1 / draws) * (1 + 1e-4)
    assert variance.mean() == pytest.approx(s**2 / 6, rel=0.02)
    # QSGD's bound (Alistarh et al. 2017, theorem 3.2) for 255 steps
    assert variance.sum() < min(len(x) / 255**2, len(x) ** 0.5 / 255) * x.double().norm() ** 2
    neighbours = torch.corrcoef((came - x)[:, 100:104].T) - torch.eye(4)
    assert neighbours.abs().max() < 0.25


def test_a_draw_repeats_itself_and_others_differ() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(2))
    first, again, other = (STOCHASTIC.message(x, draw=draw) for draw in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_long_tensors_meet_the_table_more_than_once() -> None:
    x = torch.randn(TABLE + 5000, generator=torch.Generator().manual_seed(3))
    y = torch.zeros_like(x)
    Dither(0, x.device).add_to(y)
    assert not torch.equal(y[:5000], y[TABLE:])
    payload = EightBit(rounding="stochastic")
    assert ((through(payload, x) - x).abs() < 9.0 / 255).all()


def test_values_that_span_more_than_float32_does_are_not_finite() -> None:
    x = torch.tensor([3e38, -3e38, 0.0])
    assert not through(NEAREST, x).isfinite().any()
