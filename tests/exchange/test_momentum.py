from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Adam

from lightning_sdpipe.exchange.encoded_rounds import gradient_to_apply, momentum_to_send
from lightning_sdpipe.exchange.payloads import ErrorFeedback, OneBit
from lightning_sdpipe.optim import FrozenVariance

BETA = 0.9


def gradients(step: int, workers: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(workers, n, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def test_in_full_precision_the_gradient_to_apply_is_the_mean() -> None:
    momentum = torch.zeros(16, dtype=torch.float64)
    for step in range(30):
        grads = gradients(step, 4, 16, torch.float64)
        mean = torch.stack([momentum_to_send(momentum, grad, BETA) for grad in grads]).mean(0)
        assert (gradient_to_apply(momentum, mean, BETA) - grads.mean(0)).abs().max() < 1e-15
        momentum = mean


@pytest.mark.parametrize("after", [3, 8])
def test_adam_holds_the_momentum_that_was_received(after: int) -> None:
    """1-bit Adam in one process: the parameters follow m̄' over the frozen variance."""
    workers, n, payload = 3, 64, OneBit(64, momentum=BETA, after=after)
    param = nn.Parameter(torch.zeros(n))
    optimizer = FrozenVariance(Adam([param], lr=0.01, betas=(BETA, 0.99)), after=payload.after, floor=0)
    momentum, feedbacks = torch.zeros(n), [ErrorFeedback(torch.zeros(n)) for _ in range(workers)]
    for step in range(20):
        grads, now = gradients(step, workers, n, torch.float32), payload.at(step)
        mean = torch.zeros(n)
        for grad, feedback in zip(grads, feedbacks, strict=True):
            message = torch.empty(now.nbytes(n), dtype=torch.uint8)
            residual = feedback.residual if now.feedback else None
            now.encode(momentum_to_send(momentum, grad, BETA), message, residual)
            now.decode(message, mean, 1 / workers)
        before, variance = param.detach().clone(), optimizer.state[param].get("exp_avg_sq", torch.zeros(n)).clone()
        param.grad = gradient_to_apply(momentum, mean, BETA)
        optimizer.step()
        state = optimizer.state[param]
        torch.testing.assert_close(state["exp_avg"], mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(state["exp_avg_sq"], variance) == (step >= after)
        divisor = (state["exp_avg_sq"] / (1 - 0.99 ** min(step + 1, after))).sqrt() + 1e-8
        moved = -0.01 * state["exp_avg"] / (1 - BETA ** (step + 1)) / divisor
        torch.testing.assert_close(param.detach() - before, moved, rtol=1e-4, atol=1e-6)
        momentum = mean
    assert all(bool(feedback.residual.any()) for feedback in feedbacks)


def test_gradients_of_sixteen_bits_make_a_momentum_of_thirty_two() -> None:
    sent = momentum_to_send(torch.zeros(3), torch.ones(3, dtype=torch.bfloat16), BETA)
    assert sent.dtype == torch.float32
    torch.testing.assert_close(sent, torch.full((3,), 0.1))
