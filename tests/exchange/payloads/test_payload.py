"""What holds for every payload, on awkward sizes and values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.payloads import EightBit, ErrorFeedback, Full, Half, Modulo, OneBit, Payload
from lightning_sdpipe.exchange.payloads import payload as base
from lightning_sdpipe.exchange.payloads.payload import residual_dtype

BLOCK = 16
BLOCKED: tuple[Payload, ...] = (EightBit(BLOCK), EightBit(BLOCK, rounding="stochastic"), OneBit(BLOCK))
PAYLOADS: tuple[Payload, ...] = (Full(), Half(), Half("bfloat16"), *BLOCKED)
SIZES = (0, 1, 7, 8, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 3)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

MOST = torch.finfo(torch.float32).max
awkward = st.one_of(
    st.floats(-2.0, 2.0, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1.0, 1e-45, -1e-40, 1.1754944e-38, 65504.0, 65520.0, MOST, -MOST]),
)


@pytest.fixture(autouse=True, scope="module")
def short_pieces() -> object:
    """So that short tensors have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "CPU_PIECE", 2 * BLOCK)
        patch.setattr(base, "DEVICE_PIECE", 3 * BLOCK)
        yield


def normal(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def decoded(payload: Payload, message: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.full((n,), 7.0, dtype=dtype, device=message.device)
    payload.decode(message, values)
    return values


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("payload", PAYLOADS, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_a_message_can_be_read_from_anywhere_replaced_and_added(payload: Payload, n: int, device: str) -> None:
    x = normal(n).to(device)
    message = payload.message(x, draw=5)
    assert message.shape == (payload.nbytes(n),)
    values = decoded(payload, message, n)
    odd = torch.zeros(len(message) + 3, dtype=torch.uint8, device=device)[3:]
    payload.encode(x, odd, draw=5)
    assert torch.equal(odd, message)
    assert torch.equal(decoded(payload, odd, n), values)
    total = torch.ones(n, device=device)
    payload.decode(message, total, 1.0)
    assert torch.equal(total, 1 + values)
    payload.decode(message, total, -0.5)
    torch.testing.assert_close(total, 1 + 0.5 * values)


@pytest.mark.parametrize("payload", PAYLOADS, ids=str)
def test_receivers_with_other_pieces_read_the_same_bits(payload: Payload, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 20 * BLOCK + 5
    message = payload.message(normal(n))
    before = decoded(payload, message, n)
    monkeypatch.setattr(base, "CPU_PIECE", 7 * BLOCK)
    assert torch.equal(decoded(payload, message, n), before)
    if payload != EightBit(BLOCK, rounding="stochastic"):  # whose noise is per piece
        assert torch.equal(payload.message(normal(n)), message)


@pytest.mark.parametrize("payload", PAYLOADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_buffers_of_other_types_lose_what_float32_would_lose_at_most(payload: Payload, dtype: torch.dtype) -> None:
    n = 3 * BLOCK + 5
    x = normal(n, dtype=dtype)
    bound = payload.on(dtype)
    message = bound.message(x)
    values = decoded(bound, message, n, dtype)
    if isinstance(payload, Full) or (isinstance(payload, Half) and dtype.itemsize == 2):
        assert message.numel() == n * dtype.itemsize
        assert torch.equal(values, x)
    else:
        as_float32 = decoded(payload, payload.message(x.float()), n)
        torch.testing.assert_close(values, as_float32.to(dtype), rtol=0, atol=0)
    mean = torch.zeros(n)
    bound.decode(message, mean, 0.5)
    torch.testing.assert_close(mean, 0.5 * values.float(), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("payload", BLOCKED, ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_reaches_every_receiver_and_no_residual(
    payload: Payload, poison: float, device: str
) -> None:
    n = 4 * BLOCK + 3
    x, residual = normal(n).to(device), normal(n, seed=1).to(device)
    x[2 * BLOCK + 5], x[-1] = poison, poison
    before = residual.clone()
    message = payload.message(x, residual)
    values = decoded(payload, message, n)
    for start in range(0, n, BLOCK):
        block = slice(start, start + BLOCK)
        if start in (2 * BLOCK, 4 * BLOCK):
            assert not values[block].isfinite().any()
            assert torch.equal(residual[block], before[block])
        else:
            torch.testing.assert_close(residual[block], x[block] + before[block] - values[block])
            assert not torch.equal(residual[block], before[block])


@given(st.lists(awkward, max_size=3 * BLOCK + 1), st.sampled_from(BLOCKED))
def test_nothing_finite_becomes_anything_else_and_residuals_are_what_is_missing(
    x: list[float], payload: Payload
) -> None:
    values = torch.tensor(x, dtype=torch.float32)
    residual = torch.zeros_like(values)
    came = decoded(payload, payload.message(values, residual), len(x))
    for block, exact, missing in zip(came.split(BLOCK), values.split(BLOCK), residual.split(BLOCK), strict=True):
        if exact.abs().double().sum() < MOST:  # then so is the span of the values
            assert block.isfinite().all()
            assert torch.equal(missing, exact - block)


def telescopes(payload: Payload, dtype: torch.dtype, steps: int = 30) -> float:
    """How far the sum of everything sent, and the residual, is from the sum of what should be sent."""
    n = 3 * BLOCK + 5
    residual = ErrorFeedback(normal(n, dtype=dtype)).residual
    total, sent = torch.zeros(2, n, dtype=torch.float64)
    for step in range(steps):
        x = normal(n, step, dtype)
        message = payload.message(x, residual, draw=step)
        payload.decode(message, sent, 1.0)
        total += x
    return float((sent + residual - total).abs().max())


@pytest.mark.parametrize("payload", [*BLOCKED, Half(), Half("bfloat16")], ids=str)
def test_feedback_sends_everything_in_the_end(payload: Payload) -> None:
    assert telescopes(payload, torch.float64) < 1e-13
    assert telescopes(payload, torch.float32) < 1e-4
    assert telescopes(payload, torch.bfloat16) < 1e-4  # its residual is float32


def test_residuals_follow_the_loss_scale_and_can_be_dropped() -> None:
    feedback = ErrorFeedback(torch.zeros(3, dtype=torch.bfloat16))
    assert feedback.residual.dtype == torch.float32
    feedback.follow(1024.0)  # the first scale
    feedback.residual += 8.0
    feedback.follow(512.0)
    feedback.follow(512.0)
    assert feedback.residual.tolist() == [4.0] * 3
    feedback.drop()
    assert feedback.residual.tolist() == [0.0] * 3


class Allocated(TorchDispatchMode):
    """The bytes of the longest storage that an operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = function(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.longest = max(self.longest, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("payload", [*PAYLOADS, Modulo(BLOCK)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nothing_longer_than_a_piece_or_a_message_is_made(payload: Payload | Modulo, dtype: torch.dtype) -> None:
    blocks = 60
    x, message = normal(blocks * BLOCK, dtype=dtype), torch.empty(payload.nbytes(blocks * BLOCK), dtype=torch.uint8)
    residual, theta = torch.zeros_like(x, dtype=residual_dtype(dtype)), torch.ones(blocks)
    with Allocated() as allocated:
        if isinstance(payload, Modulo):
            payload.encode(x, theta, message)
            payload.decode(message, x, x)
        else:
            payload.encode(x, message, residual)
            payload.decode(message, x, 0.5)
    piece, header = 8 * 2 * BLOCK, 8 * blocks
    assert 0 < allocated.longest <= (max(piece, header))
    assert allocated.longest < x.numel() * dtype.itemsize


@pytest.mark.parametrize("payload", PAYLOADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.complex64])
def test_refuses_what_cannot_be_averaged(payload: Payload, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigurationError, match=f"{dtype}.*equal at sync points"):
        payload.on(dtype)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Half("float8"), "dtype='float8'.*float16.*bfloat16"),
        (lambda: EightBit(0), "block=0.*positive integer"),
        (lambda: EightBit(2.5), "block=2.5"),
        (lambda: EightBit(True), "block=True"),
        (lambda: EightBit(rounding="up"), "rounding='up'.*nearest.*stochastic"),
        (lambda: OneBit(12), "block=12.*multiple of 8"),
        (lambda: OneBit(after=-1), "after=-1.*from 0"),
        (lambda: OneBit(after=1.5), "after=1.5"),
        (lambda: OneBit(momentum=1.0, after=10), "momentum=1.0.*below 1"),
        (lambda: OneBit(momentum=0.9), "after=0.*from 1 with momentum=0.9.*momentum=0"),
    ],
)
def test_refuses_values_when_they_are_made(make: Callable[[], Payload], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_payloads_are_values() -> None:
    for one, other in itertools.combinations(PAYLOADS, 2):
        assert one != other
        assert hash(one) == hash(one)
    assert EightBit() == EightBit(4096, "nearest", False)


def test_full_precision_until_low_precision_begins() -> None:
    payload = OneBit(momentum=0.9, after=3)
    assert [payload.at(update) for update in range(5)] == [Full(), Full(), Full(), payload, payload]
    assert EightBit().at(0) == EightBit()
