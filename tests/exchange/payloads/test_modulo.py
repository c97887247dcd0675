from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from lightning_sdpipe.exchange.payloads import EightBit, Modulo, Spread, payload

BLOCK = 16
MODULO = Modulo(BLOCK)


@pytest.fixture(autouse=True, scope="module")
def short_pieces() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload, "CPU_PIECE", 2 * BLOCK)
        yield


def message_of(x: Tensor, theta: float | Tensor) -> Tensor:
    return MODULO.message(x, theta if isinstance(theta, Tensor) else torch.full((-(-len(x) // BLOCK),), theta))


def read(message: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty_like(reference)
    return values, MODULO.decode(message, reference, values)


@given(
    st.lists(st.tuples(st.floats(-1e4, 1e4, width=32), st.floats(-0.999, 0.999)), min_size=1, max_size=2 * BLOCK + 3),
    st.sampled_from([1e-30, 1e-6, 1e-3, 1.0, 1e3]),
)
def test_exact_wherever_the_receiver_is_closer_than_theta(drawn: list[tuple[float, float]], theta: float) -> None:
    x = torch.tensor([value for value, _ in drawn])
    away = torch.tensor([share * theta for _, share in drawn], dtype=torch.float64)
    reference = (x.double() + away).float()
    reference = torch.where((reference.double() - x.double()).abs() < theta, reference, x)
    message = message_of(x, theta)
    own, mine_wrong = read(message, x)
    theirs, wrong = read(message, reference)
    assert not wrong.any()
    assert not mine_wrong.any()
    assert torch.equal(own, theirs)
    largest = torch.cat([block.abs().amax().expand(len(block)) for block in x.split(BLOCK)])
    assert ((own.double() - x).abs() <= theta / 252 * (1 + 1e-5) + 2**-21 * largest.double() + 1e-37).all()


LENGTH = 3 * BLOCK + 5
WRAPS = [wraps * 256 * 0.1 / 126 for wraps in (1, -1, 2, 128, 2**16)]


@example(dict(enumerate([1.0, -1.0])))  # which do not cancel
@given(st.dictionaries(st.integers(0, LENGTH - 1), st.sampled_from([-1e6, -100.0, -0.3, 0.3, 100.0, 1e6, *WRAPS])))
def test_a_wrap_is_noticed_in_its_block_and_only_there(strays: dict[int, float]) -> None:
    x = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0))
    reference = x + 0.05
    for place, distance in strays.items():
        reference[place] = x[place] + distance
    values, wrong = read(message_of(x, 0.1), reference)
    off = (values - x).abs() > 0.1 / 126
    assert wrong.tolist() == [bool(block.any()) for block in off.split(BLOCK)]
    assert set(off.nonzero().view(-1).tolist()) == {place for place, distance in strays.items()}


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_finite_for_anybody(poison: float) -> None:
    x = torch.zeros(2 * BLOCK)
    x[3] = poison
    values, wrong = read(message_of(x, 1.0), torch.zeros(2 * BLOCK))
    assert not values[:BLOCK].isfinite().any()
    assert values[BLOCK:].isfinite().all()
    assert not wrong.any()
    values, wrong = read(message_of(torch.zeros(2 * BLOCK), torch.tensor([poison, 1.0])), torch.zeros(2 * BLOCK))
    assert values.isfinite().view(2, BLOCK).all(1).tolist() == [False, True]


def test_reads_in_place() -> None:
    x = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(1))
    message = message_of(x, 0.5)
    values, _ = read(message, x)
    MODULO.decode(message, x, x)
    assert torch.equal(x, values)


def test_theta_is_four_times_the_largest_recent_distance() -> None:
    spread = Spread(BLOCK)
    assert spread.theta is None
    seen = torch.zeros(BLOCK + 3)
    seen[2], seen[-1] = -2.0, 1.0
    spread.observe(seen)
    assert spread.theta is not None
    assert spread.theta.tolist() == [8.0, 4.0]
    seen[2], seen[-1] = torch.nan, 3.0
    spread.observe(seen.bfloat16())
    assert spread.theta.tolist() == pytest.approx([8.0 * 0.9, 12.0])


def test_takes_as_many_bytes_as_eight_bits_do() -> None:
    assert Modulo().nbytes(2**20) == EightBit().nbytes(2**20) == 1_050_624
    assert Modulo().nbytes(0) == 0
