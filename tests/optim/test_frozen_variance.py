"""Frozen second moments against their definition, the bare optimizer, and interruptions of all kinds."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.optim import FrozenVariance, VarianceCorrection
from tests.features.running import quiet_trainer
from tests.optim.gradients import FREEZABLE, give_gradients, parameters, run

Make = Callable[..., Adam]


@pytest.mark.parametrize("make", FREEZABLE.values(), ids=FREEZABLE.keys())
@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_then_it_is_adam_with_the_variance_that_it_had(make: Make, floor: float) -> None:
    after, lr, beta1, beta2, eps = 6, 0.01, 0.9, 0.999, 1e-8
    params = parameters(dtype=torch.float64)
    optimizer = FrozenVariance(make(params, lr=lr), after=after, floor=floor)
    group = optimizer.param_groups[0]
    sign, decay = -1.0 if group["maximize"] else 1.0, group["weight_decay"]
    exact = [
        {"x": param.detach().clone(), "m": torch.zeros_like(param), "v": [torch.zeros_like(param)], "t": 0}
        for param in params
    ]
    for step in range(20):
        give_gradients(params, step)
        for param, state in zip(params, exact, strict=True):
            if param.grad is None:
                continue
            x, g = state["x"], sign * param.grad
            if group["decoupled_weight_decay"]:
                x = x * (1 - lr * decay)
            else:
                g = g + decay * x
            state["t"] += 1
            state["m"] = beta1 * state["m"] + (1 - beta1) * g
            if state["t"] <= after:
                state["v"].append(beta2 * state["v"][-1] + (1 - beta2) * g**2)
            v = torch.stack(state["v"]).amax(0) if group["amsgrad"] else state["v"][-1]
            if state["t"] > after:
                v = v.clamp(min=float(floor * v.mean()))
            divisor = (v / (1 - beta2 ** min(state["t"], after))).sqrt() + eps
            state["x"] = x - lr * state["m"] / (1 - beta1 ** state["t"]) / divisor
        optimizer.step()
        for param, state in zip(params, exact, strict=True):
            rtol = 1e-6 if isinstance(group["lr"], Tensor) else 1e-10  # which is of float32
            torch.testing.assert_close(param.detach(), state["x"], rtol=rtol, atol=rtol / 100)
    for param, state in zip(params, exact, strict=True):
        assert int(optimizer.state[param]["step"]) == state["t"]


def test_its_bias_correction_is_frozen_too() -> None:
    """Else a constant gradient would be divided by ever less, as if there had been many more small ones."""
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer, moves = FrozenVariance(Adam([param], lr=1.0, betas=(0.0, 0.999), eps=0.0), after=2), []
    for _ in range(50):
        before = param.item()
        param.grad = torch.ones_like(param)
        optimizer.step()
        moves.append(before - param.item())
    assert moves == pytest.approx([1.0] * 50)


def test_what_had_no_gradient_is_not_thrown_away_by_its_first_one() -> None:
    def moves(floor: float) -> list[float]:
        row, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
        optimizer = FrozenVariance(Adam([row, unused], lr=0.1), after=3, floor=floor)
        for step in range(4):
            row.grad = torch.tensor([1.0, 0.0 if step < 3 else 1.0])
            unused.grad = torch.tensor([0.0 if step < 3 else 1.0])
            optimizer.step()
        return [abs(x) for x in [*row.tolist(), *unused.tolist()]]

    # of two second moments the mean is 1/2, so 0.02 makes the divisor 0.1; and 0.1/(1 - 0.9⁴) is what has come of m
    assert moves(0.02) == pytest.approx([0.4, 0.1 * (0.1 / (1 - 0.9**4)) / 0.1, 0.0], rel=1e-5)
    assert moves(0.0)[1] > 1e5


def test_what_was_frozen_stays_frozen_with_a_larger_after() -> None:
    params = parameters()
    first = FrozenVariance(Adam(params), after=4)
    run(first, params, range(9))
    second = FrozenVariance(Adam(params), after=100)
    second.load_state_dict(first.state_dict())
    before = [second.state[param]["exp_avg_sq"].clone() for param in params]
    run(second, params, range(9, 14))
    assert all(torch.equal(second.state[p]["exp_avg_sq"], v) for p, v in zip(params, before, strict=True))


@pytest.mark.parametrize("steps", [3, 40])
def test_takes_over_from_a_bare_optimizer(steps: int) -> None:
    params, reference = parameters(), parameters()
    bare = Adam(params)
    run(bare, params, range(steps))
    run(Adam(reference), reference, range(steps))
    optimizer = FrozenVariance(bare, after=10)
    run(optimizer, params, range(steps, steps + 10))
    measured = [optimizer.state[param]["variance_steps"] for param in params]
    assert measured[0] == max(steps, 10)
    state = optimizer.state[params[0]]
    assert state["frozen_steps"] == steps + 10 - measured[0] == int(state["step"]) - measured[0]


def test_grad_scaler_skips_and_unscales() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = FrozenVariance(AdamW([param], lr=0.1, weight_decay=0.0, fused=True), after=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (2.0, math.inf, 2.0):
        before = param.detach().clone()
        optimizer.zero_grad()
        scaler.scale((param * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = before - param.detach()
        torch.testing.assert_close(moved, torch.full((3,), 0.1 if factor == 2.0 else 0.0))
    assert optimizer.state[param]["frozen_steps"] == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(parameters(), lr=0.1), "SGD"),
        (lambda: NAdam(parameters()), "NAdam"),
        (lambda: VarianceCorrection(Adam(parameters())), "nothing to correct"),
        (lambda: FrozenVariance(Adam(parameters()), after=1), "FrozenVariance"),
        (lambda: Adam(parameters(), differentiable=True), "differentiable"),
        (lambda: Adam(parameters(), capturable=True), "capturable"),
        (lambda: Adam([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]), "complex64.*view_as_real"),
    ],
)
def test_refuses_what_it_cannot_freeze(make: Callable[[], Optimizer], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FrozenVariance(make(), after=2)


@pytest.mark.parametrize("after", [0, -1, 1.5, True])
def test_refuses_impossible_numbers_of_gradients(after: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"after={after!r}"):
        FrozenVariance(Adam(parameters()), after=after)


@pytest.mark.parametrize("floor", [-0.1, 1.1, math.nan])
def test_refuses_impossible_floors(floor: float) -> None:
    with pytest.raises(ConfigurationError, match=f"floor={floor!r}"):
        FrozenVariance(Adam(parameters()), after=1, floor=floor)


def test_refuses_sparse_gradients() -> None:
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        FrozenVariance(Adam([param]), after=1).step()


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return (self.line(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Optimizer:
        return FrozenVariance(AdamW(self.parameters(), lr=0.01), after=5)


def test_lightnings_checkpoints_resume_before_and_after_it_freezes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 1)), batch_size=24)
    start = Line().state_dict()

    def fit(resume: Path | None = None) -> list[nn.Parameter]:
        module = Line()
        module.load_state_dict(start)
        every = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, enable_version_counter=False)
        trainer = quiet_trainer(max_epochs=9, callbacks=[every])
        trainer.fit(module, data, ckpt_path=resume)
        return list(module.parameters())

    straight = fit()
    for stop in (3, 7):
        (saved,) = tmp_path.glob(f"*step={stop}.ckpt")
        assert all(torch.equal(one, other) for one, other in zip(straight, fit(saved), strict=True))
