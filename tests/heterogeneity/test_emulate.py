"""Emulated blocks take their time, and are ordinary blocks otherwise."""

import math
import time
from typing import Any

import pytest
import torch

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import EmulatedBlock
from lightning_sdpipe.heterogeneity.emulate import Pacer
from tests.heterogeneity.test_slowdowns import Clock


@pytest.mark.parametrize(("overshoot", "accumulated"), [(0.0002, 0.0002), (0.01, 10 * 0.01 - 9 * 0.001)])
def test_late_awakenings_are_made_up_for_within_limits(overshoot: float, accumulated: float) -> None:
    clock = Clock(overshoot, now=0.0)
    pacer = Pacer(clock, clock.sleep)
    for _ in range(10):
        pacer.sleep_until(clock() + 0.05)
    assert clock.now == pytest.approx(0.5 + accumulated)


def test_a_passed_deadline_is_not_waited_for() -> None:
    clock = Clock(overshoot=1.0, now=3.0)
    Pacer(clock, clock.sleep).sleep_until(2.5)
    assert clock.now == 3.0


def test_forward_and_backward_take_their_time() -> None:
    block = EmulatedBlock(0.02, 0.03)
    start = time.perf_counter()
    output = block(torch.zeros(2, 4))
    middle = time.perf_counter()
    output.sum().backward()
    end = time.perf_counter()
    assert middle - start >= 0.02
    assert end - middle >= 0.03 - 0.001  # the carry of the first


@pytest.mark.parametrize(
    ("shape", "out_shape", "expected"),
    [
        ((3, 4), None, (3, 4)),
        ((3, 4), (2, 5), (3, 2, 5)),
        ((3, 2, 6, 6), (7,), (3, 7)),
        ((3,), (7,), (3, 7)),
        ((3, 4), (), (3,)),
    ],
)
def test_shapes_and_gradients(
    shape: tuple[int, ...], out_shape: tuple[int, ...] | None, expected: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    block = EmulatedBlock(0.0, 0.0, out_shape=out_shape, num_parameters=5)
    x = torch.randn(shape, requires_grad=True)
    output = block(x)
    assert output.shape == expected
    assert output.is_contiguous()
    output.sum().backward()
    assert x.grad is not None
    assert block.weight.grad is not None
    torch.testing.assert_close(x.grad, torch.full(shape, output.numel() / x.numel()))
    torch.testing.assert_close(block.weight.grad, torch.full((5,), output.numel() / 5))


def test_takes_token_ids() -> None:
    block = EmulatedBlock(0.0, 0.0, out_shape=(4,))
    output = block(torch.tensor([[1, 3], [5, 5]]))
    torch.testing.assert_close(output.detach(), torch.tensor([[2.0] * 4, [5.0] * 4]))


def test_nothing_sleeps_on_meta() -> None:
    block = EmulatedBlock(3600.0, 3600.0, out_shape=(4,)).to("meta")
    output = block(torch.zeros(2, 3, device="meta"))
    output.sum().backward()
    assert output.shape == (2, 4)


@pytest.mark.parametrize(
    "wrong", [{"forward_seconds": -1.0}, {"backward_seconds": math.nan}, {"out_shape": (3, 0)}, {"num_parameters": 0}]
)
def test_refuses_impossible_blocks(wrong: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"forward_seconds": 0.0, "backward_seconds": 0.0, **wrong}
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        EmulatedBlock(**arguments)
