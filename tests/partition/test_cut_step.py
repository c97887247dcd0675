import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.cut_step import CutModel
from lightning_sdpipe.partition.message import NOTHING_MORE, Message
from lightning_sdpipe.partition.placeholder import SkippedCutError

CPU = torch.device("cpu")


def in_two(model: nn.Module, chain: list[str], at: int, step: Callable[[], Any]) -> Any:
    """Runs ``step`` as a first stage of ``at`` blocks and a second of the rest, in one process."""
    first, second = range(at), range(at, len(chain))
    cut_model = CutModel(model, chain, [first, second], CPU)
    try:
        message = cut_model.run(first, step, None, NOTHING_MORE)
        assert isinstance(message, Message)
        return cut_model.run(second, step, message, NOTHING_MORE)
    finally:
        cut_model.restore()


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_cut_step_computes_what_the_whole_one_does(at: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(3, 4)

    def step() -> Tensor:
        return (model(2 * x) ** 2).mean()

    whole = step()
    cut = in_two(model, ["0", "1", "2", "3", "4"], at, step)
    assert torch.equal(cut, whole)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (whole, cut)]
    for expected, gradient in zip(*gradients, strict=True):
        assert torch.equal(gradient, expected)


class Glue(nn.Module):
    """Three layers with glue between them that depends on shapes only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + torch.zeros_like(x).sin_())
            mask = torch.ones(x.shape[0], device=x.device)
            x = x * mask[:, None]
        return x


def test_glue_between_blocks_runs_where_it_belongs() -> None:
    model, x = Glue(), torch.randn(2, 4)
    assert torch.equal(in_two(model, ["layers.0", "layers.1", "layers.2"], 2, lambda: model(x)), model(x))


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        return a + self.c(self.b(a))


def test_a_value_that_skips_the_cut_is_an_error() -> None:
    model, x = Skip(), torch.randn(2, 4)
    with pytest.raises(SkippedCutError, match=r"block 'a'.*is used by the result of the step"):
        in_two(model, ["a", "b", "c"], 2, lambda: model(x))


def test_blocks_that_do_not_run_in_order_are_an_error() -> None:
    model, x = Skip(), torch.randn(2, 4)
    with pytest.raises(ConfigurationError, match="'b' ran after block 'a'"):
        in_two(model, ["b", "a", "c"], 2, lambda: model.c(model.b(model.a(x))))
    with pytest.raises(ConfigurationError, match="'b' ran after block 'c'"):
        in_two(model, ["a", "b", "c"], 2, lambda: model.b(model.c(model.a(x))))


def test_one_stage_runs_blocks_in_any_order_and_several_times() -> None:
    """Each time with other draws, which a checkpoint draws again."""
    model, x = nn.ModuleDict({"b": nn.Dropout(0.5), "a": nn.Linear(9, 9)}), torch.randn(4, 9)
    cut_model = CutModel(model, ["b", "a"], [range(2)], CPU)

    def once(value: Tensor) -> Tensor:
        return model["b"](model["a"](value))

    def step(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        model.zero_grad()
        cut_model.streams.begin(1)
        outputs = call(x), call(x)
        torch.stack(outputs).square().sum().backward()
        return *outputs, model["a"].weight.grad

    def run(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        return cut_model.run(range(2), lambda: step(call), None, None)

    one, other, gradient = run(once)
    assert not torch.equal(one, other)
    assert torch.equal(run(lambda value: checkpoint(once, value, use_reentrant=False))[2], gradient)
    cut_model.restore()


def test_a_block_of_another_worker_is_not_called_outside_of_a_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    cut_model = CutModel(model, ["0", "1"], [range(1)], CPU)
    with pytest.raises(ConfigurationError, match="'1' was called on a worker that does not hold it"):
        model(torch.zeros(1, 2))
    with pytest.raises(ConfigurationError, match="A Linear of the model was copied or pickled during a run"):
        copy.deepcopy(model)
    cut_model.restore()
    assert type(model[0]) is nn.Linear


def test_hooks_of_the_user_see_a_block_on_every_stage_that_runs_or_stands_in_for_it() -> None:
    model, x, seen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.randn(1, 2), []
    model[0].register_forward_hook(lambda *_: seen.append("first"))
    model[1].register_forward_hook(lambda *_: seen.append("second"))
    in_two(model, ["0", "1"], 1, lambda: model(x))
    assert seen == ["first", "first", "second"]
