"""What a step costs is counted, and belongs to the block that runs it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.partition.costs import ACCELERATOR, CPU, Costs, Rates, count, rates_of

FLOPS = Rates(flops=1.0, bandwidth=float("inf"), operation=0.0)
BYTES = Rates(flops=float("inf"), bandwidth=1.0, operation=0.0)
OPERATIONS = Rates(flops=float("inf"), bandwidth=float("inf"), operation=1.0)


class Model(nn.Module):
    """A table whose layers run in another order than listed, one twice; code between blocks multiplies by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 2, bias=False)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.twice = nn.Linear(8, 8, bias=False)
        self.outside = nn.Parameter(torch.eye(8))
        self.skipped = -1

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.skipped:
                x = self.twice(layer(x)) if number < 2 else layer(x)
        return self.last(x @ self.outside).sum()  # type: ignore[no-any-return]


def counted(model: Model, rates: Rates, of: tuple[str, ...]) -> tuple[list[float], Costs]:
    costs = count(partial(model, torch.ones(4, 8)), rates)
    return costs.of_blocks(model, [(path,) for path in of]), costs


LAYERS = ("layers.0", "layers.1", "layers.2", "last")
ONE = 2 * 4 * 8 * 8  # operations of a product with a matrix of 8 × 8


def test_forward_and_backward_count_for_each_operand_with_a_gradient() -> None:
    costs, found = counted(Model(), FLOPS, LAYERS)
    # the input needs no gradient; the layer that runs twice, and code outside, count with the block after them
    assert costs == [2 * ONE, 6 * ONE, 6 * ONE, 3 * ONE + 3 * ONE // 4]
    assert found.total == sum(costs)
    assert found.within(found.calls[0]) == found.total
    with torch.no_grad():
        assert counted(Model(), FLOPS, LAYERS)[0] == [ONE, 2 * ONE, 2 * ONE, ONE + ONE // 4]


def test_bytes_and_operations_count_and_views_move_none() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Identity(), nn.GELU())
    x = torch.ones(4, 2, 4)
    blocks = [("0",), ("1",), ("2",)]
    assert count(partial(model, x), BYTES).of_blocks(model, blocks) == [0, 0, 2 * 4 * 32]
    assert count(partial(model, x.requires_grad_()), OPERATIONS).of_blocks(model, blocks) == [2, 0, 2]


def test_the_order_has_repetitions() -> None:
    model = Model()
    _, costs = counted(model, FLOPS, LAYERS)
    assert costs.order([model.last, model.twice, *model.layers]) == [2, 1, 3, 1, 4, 0]


def test_a_layer_that_is_skipped_by_chance_costs_what_its_like_do() -> None:
    model = Model()
    model.skipped = 2
    costs, _ = counted(model, FLOPS, LAYERS)
    assert costs[2] == (costs[0] + costs[1]) / 2


def test_other_processes_are_not_called() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="communicates with other processes"):
            count(partial(dist.all_reduce, torch.ones(1)), CPU)
    finally:
        dist.destroy_process_group()


def test_devices_have_rates() -> None:
    assert rates_of(torch.device("cpu")) == CPU
    assert rates_of(torch.device("cuda", 1)) == ACCELERATOR
