from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lightning_sdpipe.exchange.algorithms import differences
from lightning_sdpipe.exchange.payloads import Half, Modulo, Payload, Spread

MODULO = Modulo(16)


def meet(x: Tensor, y: Tensor, theta: Tensor) -> bool:
    """Averages a pair; whether it could in low precision."""
    mine, theirs = MODULO.message(x, theta), MODULO.message(y, theta)
    here, there = torch.empty_like(x), torch.empty_like(y)
    wrong = differences.difference(MODULO, x, mine, theirs, here).any()
    wrong |= differences.difference(MODULO, y, theirs, mine, there).any()
    if not wrong:
        assert torch.equal(here, -there)
        x.add_(here, alpha=0.5)
        y.add_(there, alpha=0.5)
    return not wrong


def test_six_workers_in_pairs_train_and_keep_their_mean() -> None:
    workers, n = 6, 32
    wanted = torch.randn(workers, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    models, in_full = torch.zeros(2, workers, n, dtype=torch.float64)
    theta, draws, drift = torch.full((2,), 1.0), random.Random(1), 0.0
    for _ in range(400):
        i, j = draws.sample(range(workers), 2)
        for these in (models, in_full):
            these[i] -= 0.05 * (these[i] - wanted[i])
        before = models.mean(0)
        assert meet(models[i], models[j], theta)
        in_full[[i, j]] = (in_full[i] + in_full[j]) / 2
        drift = max(drift, float((models.mean(0) - before).abs().max()))
    assert drift < 1e-15
    assert (models - in_full).abs().max() < 2 / 126
    assert in_full.abs().max() > 0.5  # they have gone somewhere


def test_a_mismatch_is_noticed_by_those_who_read_wrongly_and_full_precision_sets_theta() -> None:
    x, y = torch.zeros(20), torch.zeros(20)
    y[18] = 1.0
    spread = Spread(16)
    spread.observe(torch.full((20,), 0.01))
    assert spread.theta is not None
    assert not meet(x, y, spread.theta)
    assert (float(x[18]), float(y[18])) == (0.0, 1.0)  # nothing has moved
    spread.observe(y - x)  # in full precision
    assert meet(x, y, spread.theta)
    assert float(x[18]) == pytest.approx(0.5, abs=0.02)


def group(payload: Modulo | Payload, models: list[Tensor], owner: int, theta: Tensor) -> list[Tensor]:
    """What a group's models become, of one part that ``owner`` owns."""

    def message(x: Tensor) -> Tensor:
        return payload.message(x, theta) if isinstance(payload, Modulo) else payload.message(x)

    count = len(models)
    messages = {r: message(x) for r, x in enumerate(models) if r != owner}
    mean, wrong = differences.mean_of_part(payload, models[owner], owner, [1 / count] * count, messages)
    assert not wrong.any()
    answer = message(mean)
    after = []
    for r, x in enumerate(models):
        if r == owner:
            after.append(differences.owner_takes(payload, mean, answer, count))
            continue
        change = torch.empty_like(x)
        assert not differences.difference(payload, x, messages[r], answer, change).any()
        after.append(x + change)
    return after


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize(("payload", "error"), [(MODULO, 0.3 / 252), (Half(), 2**-11 * 30)], ids=str)
def test_a_group_keeps_its_mean_though_it_is_encoded(payload: Modulo | Payload, error: float, count: int) -> None:
    start = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 10
    models = [start + 0.2 * torch.rand(40, generator=torch.Generator().manual_seed(r)) for r in range(count)]
    after = group(payload, models, count - 1, torch.full((3,), 0.3))
    before = torch.stack(models).mean(0)
    torch.testing.assert_close(torch.stack(after).mean(0), before, rtol=0, atol=1e-13)
    assert max(float((x - before).abs().max()) for x in after) < (count + 2) * error


def test_a_late_mean_keeps_the_mean_of_models_that_have_moved_on() -> None:
    models = [torch.randn(5, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(3)]
    sent = [x.clone() for x in models]
    steps = [torch.full((5,), 0.1 * r, dtype=torch.float64) for r in range(3)]
    mean = torch.stack(sent).mean(0)
    for x, step, was in zip(models, steps, sent, strict=True):
        x += step
        differences.add_late(x, mean.clone(), was)
    for x, step in zip(models, steps, strict=True):
        torch.testing.assert_close(x, mean + step)
    torch.testing.assert_close(torch.stack(models).mean(0), mean + torch.stack(steps).mean(0))
