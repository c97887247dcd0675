"""What travels besides the boundary's output, and what is refused with its name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.rehearsal import StepCalls, rehearse
from tests.partition.cutting import LossOf, Stepping, assert_equal_when_cut, planned


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def layers(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList([linear() for _ in range(count)])


class Block(nn.Module):
    """Has a layer, and does more than to run it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()


class Blocks(nn.Module):
    """One after the other."""

    kind: Callable[[], nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.kind() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = layers(3), layers(3)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = torch.relu(layer(x))
            skips.append(x)
        for layer in self.up:
            x = layer(x) + skips.pop()
        return x


class WithEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = linear(), layers()

    def forward(self, x: Tensor) -> Tensor:
        x0 = self.embedding(x)
        x = x0
        for layer in self.layers:
            x = layer(x) + 0.5 * x0
        return x


class WrittenTo(WithEmbedding):
    """A value is written to in place, by user code, after it was made and before it is used."""

    def forward(self, x: Tensor) -> Tensor:
        x0 = self.embedding(x)
        x = self.layers[0](x0.clone())
        x0 += 1
        x = self.layers[1](x) + x0
        x0 *= 2
        return self.layers[3](self.layers[2](x)) + x0


class Positioned(nn.Module):
    """Layers are given positions that only the first of them looks at."""

    class Layer(nn.Module):
        def __init__(self, looks: bool) -> None:
            super().__init__()
            self.linear, self.looks = linear(), looks

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return self.linear(x + positions if self.looks else x)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = linear()
        self.layers = nn.ModuleList(self.Layer(number == 0) for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        positions = self.embedding(x)
        for layer in self.layers:
            x = layer(x, positions)
        return x


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4 * (i + 1), 4) for i in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(torch.relu(layer(torch.cat(features, 1))))
        return torch.cat(features, 1)


class Keeps(Block):
    loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.loss = y.square().mean()
        return y


class KeepsLosses(Blocks):
    kind = Keeps


def with_kept_losses(model: Any, x: Tensor) -> Tensor:
    return model(x).mean() + sum(layer.loss for layer in model.layers)


class Appends(Block):
    def forward(self, x: Tensor, values: list[Tensor], sums: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.linear(x)
        values.append(y)
        sums["y"] = sums.get("y", torch.zeros(())) + y
        return y + values[0]


class HandsOnLists(Blocks):
    kind = Appends

    def forward(self, x: Tensor) -> Tensor:
        values: list[Tensor] = []
        sums: dict[str, Tensor] = {}
        for layer in self.layers:
            x = layer(x, values, sums)
        return x + values[1] + sums["y"]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.relu(self.first(x)))
        return y


class Hooked(Blocks):
    """Hooks of the user's see values within blocks, and change one of them."""

    kind = Inner

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        return super().forward(x) + sum(self.features)


def register_hooks(model: Any) -> None:
    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        model.features.append(output)

    for layer in model.layers:
        layer.first.register_forward_hook(note)
        layer.first.register_forward_hook(lambda module, args, output: output + 1)
        layer.register_forward_hook(lambda module, args, kwargs, output: note(module, args, args[0]), with_kwargs=True)


class WithNumber(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        y: Tensor = self.linear(x)
        return y, y.detach().abs().max().item()


class Numbers(Blocks):
    """Blocks return Python numbers, and user code turns tensors into them."""

    kind = WithNumber

    def forward(self, x: Tensor) -> Tensor:
        total = 0.0
        for layer in self.layers:
            x, number = layer(x)
            total += number + x.detach().abs().max().item() + float(x.detach().numpy().min()) + sum(x[0].tolist())
            x = x[x[:, 0] > -1e6]
        return x * total


class Bank(nn.Module):
    """Keeps features over steps: in a list, in an attribute and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.bank = layers(), list[Tensor]()
        self.register_buffer("mean", torch.zeros(4))
        self.before = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        self.bank.append(h.detach())
        y = h
        for layer in self.layers[1:]:
            y = layer(y)
        y = y + sum(self.bank).mean(0) + self.mean + self.before
        self.before = h.detach().mean(0)
        return y


class Tied(WithEmbedding):
    """User code computes with a weight of a block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.embedding.weight


def with_weight_decay(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + 0.01 * sum(p.square().sum() for p in model.parameters())


class Skips(nn.Module):
    """LayerDrop at any layer, with noise between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.dropout(x, 0.2, True) * random.random()
            if torch.rand(()) < 0.4:
                continue
            x = torch.relu(layer(x)) * float(np.random.rand())
        return x


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Reverses(WithEmbedding):
    """Values of one memory that differ in their gradients, made in a block and outside."""

    class First(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = self.linear(x)
            return Reversal.apply(h), h, h.detach()

    def __init__(self) -> None:
        super().__init__()
        self.embedding = self.First()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        reversed_, h, detached = self.embedding(x)
        outside = Reversal.apply(h)
        y = h.view(-1, 2).view(-1, 4)
        for layer in self.layers:
            y = layer(y)
        return y * reversed_ + outside * detached + h.detach()


class Masks(Block):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) * mask, mask


class PassesOn(Blocks):
    """Blocks return what they were given, beside their own, and a later block has it from an early one."""

    kind = Masks

    def forward(self, x: Tensor) -> Tensor:
        x, first = self.layers[0](x, (x > 0).float())
        for layer in self.layers[1:]:
            x, _ = layer(x, first)
        return x


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def batches(count: int) -> list[Tensor]:
    return [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(
    ("make", "loss_of", "count"),
    [
        (UNet, mean_square, 2),
        (WithEmbedding, mean_square, 2),
        (WrittenTo, mean_square, 2),
        (Positioned, mean_square, 2),
        (Dense, mean_square, 2),
        (KeepsLosses, with_kept_losses, 2),
        (HandsOnLists, mean_square, 2),
        (Numbers, mean_square, 2),
        (Bank, mean_square, 3),
        (Tied, mean_square, 2),
        (WithEmbedding, with_weight_decay, 2),
        (Skips, mean_square, 12),
        (Reverses, mean_square, 2),
        (PassesOn, mean_square, 2),
    ],
)
def test_values_that_pass_by_the_boundary_travel(
    make: type[nn.Module], loss_of: LossOf, count: int, num_stages: int
) -> None:
    torch.manual_seed(0)
    assert_equal_when_cut(Stepping(make(), loss_of), batches(count), num_stages)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_what_hooks_have_seen_travels(num_stages: int) -> None:
    torch.manual_seed(0)
    assert_equal_when_cut(Stepping(Hooked(), mean_square, register_hooks), batches(2), num_stages)


ELSEWHERE: list[Tensor] = []


class AppendsElsewhere(Block):
    def forward(self, x: Tensor) -> Tensor:
        ELSEWHERE.append(self.linear(x))
        return ELSEWHERE[-1] * 2


class KeepsElsewhere(Blocks):
    kind = AppendsElsewhere

    def forward(self, x: Tensor) -> Tensor:
        ELSEWHERE.clear()
        return super().forward(x) + ELSEWHERE[0]


class SetLate(Bank):
    """What the end of one step sets is used at the beginning of the next one."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + self.mean)
        self.mean = x.detach().mean(0)
        return x


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x


class TwiceAndHead(Twice):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.layers[0], *self.layers):
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (KeepsElsewhere, r"'model\.layers\.0' makes a value \(aten\.addmm.*does not hand it on.* result of the step"),
        (SetLate, r"keeps a value from one batch to the next. It is set .* needs it \(aten\.add"),
        (Twice, r"'model\.layers\.0', 'model\.layers\.1'\] run more than once"),
        (TwiceAndHead, r"\['model\.layers\.0'\] run more than once"),
    ],
)
def test_what_cannot_travel_is_refused_before_training(make: type[nn.Module], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        planned(Stepping(make(), mean_square), batches(2), 2)


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + gradient.square().mean()


def test_gradients_through_other_stages_are_refused_in_a_step() -> None:
    with pytest.raises(ConfigurationError, match="asks autograd for gradients"):
        assert_equal_when_cut(Stepping(WithEmbedding(), gradient_penalty), batches(2), 2)


def test_blocks_are_put_into_the_order_in_which_they_run() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.layers = layers(3)
            self.embedding = linear()

        def forward(self, x: Tensor) -> Tensor:
            x = self.embedding(x)
            for layer in reversed(self.layers):
                x = layer(x)
            return self.norm(x)

    cut = assert_equal_when_cut(Stepping(Backwards(), mean_square), batches(2), 2)
    assert cut.chain == tuple(f"model.{name}" for name in ("embedding", "layers.2", "layers.1", "layers.0", "norm"))


def test_what_crosses_a_cut_counts_in_its_bytes() -> None:
    module = Stepping(UNet(), mean_square)
    steps = [(batch, ()) for batch in batches(2)]
    chain = [f"model.{part}.{i}" for part in ("down", "up") for i in range(3)]
    rehearsed = rehearse(module, chain, [StepCalls("training_step", steps, True)], torch.device("cpu"))
    crossings = [rehearsed.crossing("training_step", cut) for cut in range(1, 6)]
    assert [crossing.activation_bytes for crossing in crossings] == [48, 96, 144, 192, 144]
    assert [crossing.gradient_bytes for crossing in crossings] == [48, 96, 144, 192, 144]


class Rectified(nn.Module):
    """Looks at what a block returned before and after the next one has written into it."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU(inplace), nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        mean = first.mean()
        second = self.layers[1](first)
        third = self.layers[3](self.layers[2](second))
        return third * mean + first - second.abs().sum()


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_what_a_block_writes_into_is_changed_for_all_who_hold_it(inplace: bool, num_stages: int) -> None:
    torch.manual_seed(0)
    step = Stepping(Rectified(inplace), lambda model, x: model(x).square().mean())
    assert_equal_when_cut(step, batches(2), num_stages)
