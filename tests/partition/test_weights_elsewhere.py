"""Weights of other stages: what may be done to them alone is done where they are, and nothing is computed from them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.placeholder import SkippedCutError, WeightElsewhere

CPU = torch.device("cpu")


def weight(requires_grad: bool = True) -> Any:
    return WeightElsewhere(nn.Parameter(torch.ones(3), requires_grad), CPU, "net.0.weight")


def trained() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    return parameter


def test_it_is_a_parameter_with_a_shape_and_a_device_that_is_not_here() -> None:
    module = nn.Linear(3, 1, bias=False)
    module.weight = weight()
    assert isinstance(module.weight, nn.Parameter)
    assert [p.is_meta for p in module.parameters()] == [True]
    assert module.state_dict()["weight"].is_meta
    assert (module.weight.device, module.weight.shape, module.weight.numel()) == (CPU, (3,), 3)
    copied = copy.deepcopy(module).weight
    assert isinstance(copied, nn.Parameter)
    assert copied.is_meta
    assert copied.requires_grad


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.clamp_(0, 1),
        lambda p: p.data.mul_(2),
        lambda p: nn.init.normal_(p),
        lambda p: p.copy_(torch.zeros(3)),
        lambda p: p.grad.clamp_(-1, 1),
        lambda p: setattr(p, "grad", p.grad - p.grad.mean()),
        lambda p: torch.nn.utils.clip_grad_value_([p, trained()], 0.1),
        lambda p: torch.zeros_like(p).mul_(0.9).add_(p.grad),  # momentum by hand
    ],
)
def test_what_is_done_to_it_alone_is_done_elsewhere(change: Callable[[Any], Any]) -> None:
    with torch.no_grad():
        change(weight())


@pytest.mark.parametrize(
    "use",
    [
        lambda p: torch.zeros(3).lerp_(p, 0.5),
        lambda p: torch.zeros(3).mul_(0.5).add_(p.data, alpha=0.5),  # which torch's own meta tensors let pass
        lambda p: torch._foreach_lerp_([torch.zeros(3)], [p], 0.5),
        lambda p: torch.zeros(3).copy_(0.5 * torch.ones(3) + 0.5 * p),
        lambda p: float(sum(q.norm() for q in (trained(), p))),
        lambda p: bool(torch.isfinite(p.grad).all()),
        lambda p: p.detach().numpy(),
    ],
)
def test_nothing_that_lives_is_computed_from_it(use: Callable[[Any], Any]) -> None:
    with torch.no_grad(), pytest.raises(SkippedCutError, match=r"Another stage holds .*'net\.0\.weight'"):
        use(weight())


@pytest.mark.parametrize("foreach", [None, False])
def test_no_norm_of_gradients_leaves_its_own_out(foreach: bool | None) -> None:
    mine = trained()
    with pytest.raises(SkippedCutError, match=r"the gradient of 'net.0.weight'.*self\.clip_gradients"):
        torch.nn.utils.clip_grad_norm_([weight(), mine], 0.1, foreach=foreach)
    torch.nn.utils.clip_grad_norm_([weight(requires_grad=False), mine], 0.1, foreach=foreach)
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad.norm(), torch.tensor(0.1))


def test_it_cannot_be_saved_as_if_it_were_whole() -> None:
    parts: list[Tensor] = [weight(), weight().detach()]
    for part in parts:
        with pytest.raises(ConfigurationError, match="This worker holds only its own stage of the module"):
            torch.save({"weight": part}, io.BytesIO())
