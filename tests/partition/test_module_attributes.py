"""Values that a step keeps for the next one: by its blocks, or by user code that a stage does or does not reach."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from tests.partition.cutting import Stepping, assert_equal_when_cut, planned
from tests.partition.test_side_channels import Blocks, batches, mean_square


class Cell(nn.Module):
    """Adds what it returned before, if it keeps that itself."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.linear, self.keeps = nn.Linear(4, 4), keeps
        self.state: Tensor | None = None

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        before = self.state if self.keeps else state
        y: Tensor = self.linear(x if before is None else x + before)
        if self.keeps:
            self.state = y.detach()
        return y


class KeptByBlocks(Blocks):
    kind = partial(Cell, keeps=True)  # type: ignore[assignment]


class KeptAfterEach(nn.Module):
    """As recurrent networks do that are trained through time piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Cell(keeps=False) for _ in range(4)])
        self.states: list[Tensor | None] = [None] * 4

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, self.states[number])
            self.states[number] = x.detach()
        return x


class KeptAtTheEnd(KeptAfterEach):
    def forward(self, x: Tensor) -> Tensor:
        states: list[Tensor | None] = []
        for layer, state in zip(self.layers, self.states, strict=True):
            x = layer(x, state)
            states.append(x.detach())
        self.states = states
        return x


class KeptBeforeTheEnd(KeptAfterEach):
    """Only the last stage's states are used."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, self.states[number] if number == 3 else None)
            self.states[number] = x.detach()
        return x


@pytest.mark.parametrize("make", [KeptByBlocks, KeptBeforeTheEnd])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_what_is_kept_where_it_is_used_is_there(make: type[nn.Module], num_stages: int) -> None:
    torch.manual_seed(0)
    assert_equal_when_cut(Stepping(make(), mean_square), batches(4), num_stages)


@pytest.mark.parametrize("make", [KeptAfterEach, KeptAtTheEnd])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_what_is_kept_after_the_end_of_the_stage_that_uses_it_is_refused(
    make: type[nn.Module], num_stages: int
) -> None:
    with pytest.raises(ConfigurationError, match=r"keeps a value from one batch to the next\. It is set .* after"):
        planned(Stepping(make(), mean_square), batches(2), num_stages)
