from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.profile import BlockProfile, profile

CPU = torch.device("cpu")


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Timed(nn.Module):
    """A layer whose forward and backward move a clock of their own."""

    def __init__(self, clock: Clock, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.clock, self.times = clock, (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        self.clock.seconds += self.times[0]
        return _Tick.apply(self.linear(x), self.clock, self.times[1])


class _Tick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, backward: float) -> Tensor:
        ctx.clock, ctx.backward_seconds = clock, backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clock.seconds += ctx.backward_seconds
        return gradients[0], None, None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def chain(clock: Clock) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Timed(clock, 1, 2), Timed(clock, 3, 5), Timed(clock, 8, 13))


BLOCKS = [("0",), ("1",), ("2",)]
X = torch.ones(6, 4)


def test_each_block_gets_its_own_times_and_what_crosses_after_it(clock: Clock, chain: nn.Sequential) -> None:
    measured = profile(chain, BLOCKS, lambda: chain(X).sum(), CPU, clock=clock)
    size, parameters = 6 * 4 * 4, 4 * (4 * 4 + 4)
    assert measured == (  # each keeps its input
        BlockProfile(1, 2, size, size, parameters, parameters, size),
        BlockProfile(3, 5, size, size, parameters, parameters, size),
        BlockProfile(8, 13, size, size, parameters, parameters, size),
    )


def test_modules_that_form_one_block_are_measured_together(clock: Clock, chain: nn.Sequential) -> None:
    measured = profile(chain, [("0", "1"), ("2",)], lambda: chain(X).sum(), CPU, clock=clock)
    assert [(block.forward_seconds, block.backward_seconds) for block in measured] == [(4, 7), (8, 13)]


def test_recomputation_counts_as_backward(clock: Clock, chain: nn.Sequential) -> None:
    def step() -> Tensor:
        return chain[2](checkpoint(chain[1], chain[0](X), use_reentrant=False)).sum()

    measured = profile(chain, BLOCKS, step, CPU, clock=clock)
    assert [block.forward_seconds for block in measured] == [1, 3, 8]
    assert [block.backward_seconds for block in measured] == [2, 8, 13]


def test_frozen_blocks_cost_no_backward_and_get_no_gradient(clock: Clock, chain: nn.Sequential) -> None:
    chain[0].requires_grad_(False)
    measured = profile(chain, BLOCKS, lambda: chain(X).sum(), CPU, clock=clock)
    assert [block.backward_seconds for block in measured] == [0, 5, 13]
    assert measured[0].gradient_bytes == 0


def test_what_is_kept_for_the_backward_counts_once_and_where_it_is_kept(clock: Clock, chain: nn.Sequential) -> None:
    chain[1].requires_grad_(False)

    def step() -> Tensor:
        return (chain[2](chain[1](chain[0](X)).exp()) ** 2).sum()

    measured = profile(chain, BLOCKS, step, CPU, clock=clock)
    size, parameters = 6 * 4 * 4, 4 * (4 * 4 + 4)
    # the frozen one needs its weights only, to pass gradients on; the last keeps exp's output, and its own for the loss
    assert [block.saved_bytes for block in measured] == [size, 0, 2 * size]
    assert [block.trained_bytes for block in measured] == [parameters, 0, parameters]
    assert [block.parameter_bytes for block in measured] == [parameters] * 3


def test_a_block_that_is_checkpointed_keeps_its_input_only(clock: Clock, chain: nn.Sequential) -> None:
    chain[1] = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def step() -> Tensor:
        return chain[2](checkpoint(chain[1], chain[0](X), use_reentrant=False)).sum()

    size = 6 * 4 * 4
    assert profile(chain, BLOCKS, step, CPU, clock=clock)[1].saved_bytes == size
    assert profile(chain, BLOCKS, lambda: chain(X).sum(), CPU, clock=clock)[1].saved_bytes == 2 * size


def test_the_median_of_the_runs_after_the_first_counts(clock: Clock, chain: nn.Sequential) -> None:
    forward = iter([100.0, 1.0, 50.0, 2.0])

    def step() -> Tensor:
        chain[0].times = (next(forward), 2.0)
        return chain(X).sum()

    assert profile(chain, BLOCKS, step, CPU, clock=clock)[0].forward_seconds == 2


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.metric = MeanMetric()

    def log(self, *_: Any) -> None:
        raise AssertionError("Lightning refuses to log outside of training")

    def training_step(self) -> Tensor:
        with torch.no_grad():
            self.layers[0].weight /= 2  # type: ignore[operator]
        self.layers[1].bias.data += 1  # type: ignore[operator]
        loss = self.layers(X).sum() * random.random()
        self.metric.update(loss)
        self.log("loss", loss)
        return loss


def test_no_log_hears_of_a_profile_and_gradients_do_not_stay() -> None:
    model = Stateful()
    states = torch.get_rng_state(), random.getstate()
    profile(model, [("layers.0",), ("layers.1",), ("layers.2",)], model.training_step, CPU)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert "log" not in vars(model)
    assert type(model.layers[0]) is nn.Linear


def test_an_output_that_cannot_travel_is_marked(clock: Clock) -> None:
    class Strange(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {1, super().forward(x)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Strange(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(next(v for v in self.a(x) if isinstance(v, Tensor)))

    model = Model()
    measured = profile(model, [("a",), ("b",)], lambda: model(X).sum(), CPU, clock=clock)
    assert [block.activation_bytes for block in measured] == [None, 96]


def test_what_cannot_be_measured_is_refused(clock: Clock, chain: nn.Sequential) -> None:
    with pytest.raises(ConfigurationError, match=r"did not run \['2'\]"):
        profile(chain, BLOCKS, lambda: chain[1](chain[0](X)).sum(), CPU, clock=clock)
    chain[1].to("meta")
    with pytest.raises(ConfigurationError, match=r"'1.linear.weight' and 1 other parameters are on the meta"):
        profile(chain, BLOCKS, lambda: chain(X).sum(), CPU, clock=clock)
