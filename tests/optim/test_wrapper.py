"""What holds for all optimizers that wrap another one."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_sdpipe.optim import FrozenVariance, VarianceCorrection
from lightning_sdpipe.optim.wrapper import OptimizerWrapper
from tests.optim.gradients import FAMILY, FREEZABLE, parameters, run

Wrap = Callable[[Adam], OptimizerWrapper]
WRAPPERS = pytest.mark.parametrize(
    "wrap", [partial(VarianceCorrection, num_workers=2), partial(FrozenVariance, after=1)], ids=["corrected", "frozen"]
)


def assert_equal(one: list[nn.Parameter], other: list[nn.Parameter], optimizers: tuple[Optimizer, Optimizer]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)
        for key, value in optimizers[0].state[a].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizers[1].state[b][key])), key


CORRECTED = [(partial(VarianceCorrection, num_workers=1), make, 12) for make in FAMILY.values()]
FROZEN = [(partial(FrozenVariance, after=8), make, 8) for make in FREEZABLE.values()]


@pytest.mark.parametrize(("wrap", "make", "steps"), CORRECTED + FROZEN, ids=[*FAMILY, *FREEZABLE])
def test_where_there_is_nothing_to_change_it_is_bit_equal_to_the_wrapped_optimizer(
    wrap: Wrap, make: Callable[..., Adam], steps: int
) -> None:
    """With one worker, and until it freezes."""
    bare, wrapped = parameters(), parameters()
    reference, optimizer = make(bare, lr=0.01), wrap(make(wrapped, lr=0.01))
    run(reference, bare, range(steps))
    run(optimizer, wrapped, range(steps))
    assert_equal(bare, wrapped, (reference, optimizer))


@pytest.mark.parametrize("stop", [3, 5, 9])
@pytest.mark.parametrize(
    ("wrap", "make"),
    [
        *((partial(VarianceCorrection, num_workers=4), make) for make in FAMILY.values()),
        *((partial(FrozenVariance, after=5), make) for make in FREEZABLE.values()),
    ],
    ids=[*FAMILY, *FREEZABLE],
)
def test_resumes_exactly_from_its_state(wrap: Wrap, make: Callable[..., Adam], stop: int) -> None:
    straight, resumed = parameters(), parameters()
    reference, first = wrap(make(straight, lr=0.01)), wrap(make(resumed, lr=0.01))
    run(reference, straight, range(14))
    run(first, resumed, range(stop))
    saved = copy.deepcopy(first.state_dict())
    second = wrap(make(resumed, lr=9.0))
    second.load_state_dict(saved)
    run(second, resumed, range(stop, 14))
    assert_equal(straight, resumed, (reference, second))


@WRAPPERS
def test_schedulers_hooks_and_closures_see_an_ordinary_optimizer(wrap: Wrap) -> None:
    param = nn.Parameter(torch.ones(3))
    inner = Adam([param], lr=1.0)
    optimizer = wrap(inner)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    inner.register_step_post_hook(lambda *_: calls.append("inner"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert torch.allclose(param, torch.zeros(3), atol=1e-6)
    scheduler.step()
    for _ in range(2):
        assert optimizer.step(closure) is not None
        assert param.grad is not None
        scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.125
    assert calls == ["before", "inner", "after"] * 3
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.25})
    assert [group["lr"] for group in inner.param_groups] == [0.125, 0.25]


@WRAPPERS
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_and_pickles_with_its_parameters(wrap: Wrap, clone: Callable[[Any], Any]) -> None:
    params = parameters()
    optimizer = wrap(AdamW(params, lr=0.01))
    run(optimizer, params, range(3))
    twin, twin_params = clone((optimizer, params))
    run(optimizer, params, range(3, 6))
    run(twin, twin_params, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(params, twin_params, strict=True))


@WRAPPERS
def test_buckets_change_nothing(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = parameters(), parameters()
    run(wrap(Adam(whole)), whole, range(6))
    for module in ("frozen_variance", "variance_correction"):
        monkeypatch.setattr(f"lightning_sdpipe.optim.{module}._BUCKET_ELEMENTS", 6)
    run(wrap(Adam(cut)), cut, range(6))
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
