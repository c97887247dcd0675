from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_sdpipe.partition.cut_step import Made
from lightning_sdpipe.partition.effects import Effect

BANK: list[Tensor] = []


class Shared:
    values: ClassVar[dict[str, Tensor]] = {}


class Cache:
    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}


CACHE = Cache()


@pytest.fixture(autouse=True, scope="module")
def referrers_are_seen() -> Iterator[None]:
    """Those among what was imported too, which the tests' configuration hides from the garbage collector."""
    gc.unfreeze()
    yield
    gc.freeze()


class Block(nn.Module):
    def __init__(self, keep: Callable[[Any], None]) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(2, 2), keep

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.linear, torch.relu(self.linear(x)) * 2, use_reentrant=False)
        self.keep(y)
        return y + 1


@pytest.mark.parametrize(
    ("keep", "places"),
    [
        (lambda y: None, []),
        (lambda y: BANK.append(y), [f"a variable of the module {__name__}"]),
        (lambda y: Shared.values.update(y=y), ["the class Shared"]),
        (lambda y: CACHE.values.update(y=y), ["Cache"]),
    ],
)
def test_what_a_block_keeps_elsewhere_is_named(keep: Callable[[Any], None], places: list[str]) -> None:
    block = Block(keep)
    with Made() as made:
        output = block(torch.ones(1, 2))
    found = made.kept_elsewhere([Effect("output", (), output)])
    for holder in (BANK, Shared.values, CACHE.values):
        holder.clear()
    assert found == places
