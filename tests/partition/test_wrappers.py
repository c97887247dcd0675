"""A cut next to a block that is compiled, or whose activations are recomputed in backward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_sdpipe.check import Made, compute
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.chain import find_chains
from tests.partition.families import FAMILIES


class Layer(nn.Module):
    def __init__(self, recompute: bool | None) -> None:
        super().__init__()
        self.linear, self.dropout, self.recompute = nn.Linear(4, 4), nn.Dropout(0.2), recompute

    def body(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if self.recompute is None else checkpoint(self.body, x, use_reentrant=self.recompute)


class Layers(nn.Module):
    def __init__(self, inside: bool | None = None, outside: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(inside) for _ in range(3)])
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.outside is None else checkpoint(layer, x, use_reentrant=self.outside)
        return x


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)


def assert_equal_when_cut(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> None:
    """``model`` in two pieces, against the whole."""
    chain = next(find_chains(model))
    expected = compute(lambda: made(model, loss_of), chain, [range(len(chain))])
    for at in range(1, len(chain)):
        cut = compute(lambda: made(model, loss_of), chain, [range(at), range(at, len(chain))])
        torch.testing.assert_close(cut.outcomes, expected.outcomes)
        assert cut.gradients.keys() == expected.gradients.keys()
        for name, gradient in cut.gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-5, atol=1e-6)


def made(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Made:
    module = copy.deepcopy(model)
    return module, [lambda: loss_of(module)]


@pytest.mark.parametrize("where", [{"inside": False}, {"inside": True}, {"outside": False}], ids=str)
def test_checkpointing_inside_or_around_a_block(where: dict[str, bool]) -> None:
    torch.manual_seed(0)
    assert_equal_when_cut(Layers(**where), lambda m: m(X).square().sum())


def test_reentrant_checkpointing_around_the_last_block_of_a_stage_is_refused() -> None:
    model = Layers(outside=True)
    with pytest.raises(ConfigurationError, match=r"'layers\.0'.*use_reentrant=False"):
        compute(lambda: made(model, lambda m: m(X).sum()), next(find_chains(model)), [range(1), range(1, 3)])


def test_frozen_blocks_may_run_without_gradients() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Layer(None) for _ in range(3)])

    def loss_of(m: nn.Module) -> Tensor:
        with torch.no_grad():
            x = m[1](m[0](X))
        return m[2](x).square().sum()

    assert_equal_when_cut(model, loss_of)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_checkpointing_as_transformers_enables_it(family: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    model, loss_of = FAMILIES[family]()
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_equal_when_cut(model, loss_of)


def test_blocks_that_were_compiled_in_place() -> None:
    torch.manual_seed(0)
    model = Layers().eval()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    assert_equal_when_cut(model, lambda m: m(X).square().sum())


def test_blocks_that_are_compiled_wrappers() -> None:
    torch.manual_seed(0)
    model = Layers().eval()
    model.layers = nn.ModuleList([torch.compile(layer, backend="aot_eager") for layer in model.layers])
    assert_equal_when_cut(model, lambda m: m(X).square().sum())
