from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_sdpipe.exchange import traffic
from lightning_sdpipe.exchange.algorithms import centralised
from lightning_sdpipe.exchange.payloads import EightBit, ErrorFeedback, Full, Half, OneBit, Payload, TopK

PAYLOADS = (Full(), Half(), EightBit(16), EightBit(16, "stochastic"), OneBit(16), TopK(0.2))
Feedbacks = Sequence[ErrorFeedback] | None


def normal(n: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def average(
    payload: Payload,
    xs: Sequence[Tensor],
    weights: Sequence[float],
    feedbacks: Feedbacks = None,
    step: int = 0,
    trains: Sequence[bool] | None = None,
) -> tuple[list[Tensor], int]:
    """What each member ends with, and the bytes that the first one has sent."""
    count = len(xs)
    trains = trains or [True] * count
    of = feedbacks or [None] * count
    sent = [centralised.scatter(payload, x, r, count, of[r], step * count + r, trains[r]) for r, x in enumerate(xs)]
    means = {
        r: centralised.reduce(
            payload, x, r, weights, {j: sent[j][r] for j in range(count) if j != r}, of[r], step * count + r, trains[r]
        )
        for r, x in enumerate(xs)
    }
    outs = [torch.empty_like(x) for x in xs]
    for out in outs:
        centralised.gather(payload, means, out)
    return outs, sum(m.numel() for m in sent[0].values()) + (count - 1) * means[0].numel()


@pytest.mark.parametrize("n", [0, 1, 3, 64, 101])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_full_precision_is_the_weighted_mean(n: int, count: int) -> None:
    xs = [normal(n, seed) for seed in range(count)]
    weights = [1.0] if count == 1 else [0.5, *[0.5 / (count - 1)] * (count - 1)]
    outs, _ = average(Full(), xs, weights)
    mean = sum(w * x.double() for w, x in zip(weights, xs, strict=True))
    assert isinstance(mean, Tensor)
    for out in outs:
        torch.testing.assert_close(out.double(), mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("payload", PAYLOADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_members_end_with_the_same_bits_and_send_what_is_counted(payload: Payload, dtype: torch.dtype) -> None:
    xs = [normal(203, seed, dtype) for seed in range(3)]
    payload = payload.on(dtype)
    outs, sent = average(payload, xs, [1 / 3] * 3)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert sent == traffic.group(payload, 203, 3)


@pytest.mark.parametrize("payload", [EightBit(16), EightBit(16, "stochastic")], ids=str)
def test_eight_bits_err_by_a_step_of_each_phase(payload: Payload) -> None:
    xs = [normal(256, seed) for seed in range(4)]
    outs, _ = average(payload, xs, [0.25] * 4)
    step = float(torch.stack(xs).amax() - torch.stack(xs).amin()) / 255
    assert (outs[0] - torch.stack(xs).mean(0)).abs().max() < 2 * step


@pytest.mark.parametrize("payload", [EightBit(16, "stochastic"), OneBit(16), TopK(0.2)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5)])
def test_with_feedback_nothing_is_lost_over_time(payload: Payload, dtype: torch.dtype, tolerance: float) -> None:
    count, n, steps = 4, 64, 20
    feedbacks = [ErrorFeedback(torch.zeros(n, dtype=dtype)) for _ in range(count)]
    means, outs = torch.zeros(2, n, dtype=torch.float64)
    for step in range(steps):
        xs = [normal(n, 100 * step + r, dtype) for r in range(count)]
        out, _ = average(payload, xs, [1 / count] * count, feedbacks, step)
        outs += out[0]
        means += sum(x.double() for x in xs) / count
    left = torch.zeros(n, dtype=torch.float64)
    for r, part in enumerate(centralised.parts(n, count)):
        for member, feedback in enumerate(feedbacks):
            left[part] += feedback.residual[part] * (1 if member == r else 1 / count)
    assert float((outs + left - means).abs().max()) < tolerance
    assert float(left.abs().max()) > 1e-3  # something has been left out all the same


def test_one_out_of_data_adds_zeros_and_keeps_what_it_has_left_out() -> None:
    payload, n, count = OneBit(8), 48, 3
    feedbacks = [ErrorFeedback(torch.zeros(n)) for _ in range(count)]
    xs = [normal(n, seed) for seed in range(count)]
    average(payload, xs, [1 / 3] * 3, feedbacks)
    before = feedbacks[1].residual.clone()
    weights, parts = [0.5, 0.0, 0.5], centralised.parts(n, count)
    outs, _ = average(payload, [xs[0], torch.full((n,), torch.nan), xs[2]], weights, feedbacks, 1, [True, False, True])
    assert outs[0].isfinite().all()
    for owner, part in enumerate(parts):
        kept = torch.equal(feedbacks[1].residual[part], before[part])
        assert kept == (owner != 1)  # it still owns a part, and encodes the mean of that
    zeros = centralised.scatter(payload, xs[1], 1, count, feedbacks[1], trains=False)
    for place, message in zeros.items():
        values = torch.ones_like(xs[1][parts[place]])
        payload.decode(message, values)
        assert not values.any()


def test_parts_are_those_of_tensor_split() -> None:
    for n in range(12):
        for count in range(1, 6):
            expected = [len(part) for part in torch.tensor_split(torch.zeros(n), count)]
            assert [part.stop - part.start for part in centralised.parts(n, count)] == expected
