"""Complex parameters and buffers, whose collectives and sums are those of pairs of real numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe import AllReduce, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.sync import DiLoCo
from tests.features.running import (
    Regression,
    assert_same,
    eval_loader,
    on_four_ranks,
    on_pipelines,
    one_process,
    pipelines,
    train_loader,
    weights,
)


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(8, 8, dtype=torch.complex64))
        self.register_buffer("sum", torch.zeros(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        turned = x.to(torch.complex64) @ self.weight
        if self.training:
            self.sum.add_(turned.detach().sum(0))
        return turned


class Flat(nn.Module):
    def forward(self, turned: Tensor) -> Tensor:
        return turned.real + turned.imag


class Complex(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), Turn(), Flat(), Turn(), Flat(), nn.Linear(8, 1))


def _train(directory: Path, sync: Any = None) -> dict[str, Tensor]:
    """Cut between a block that returns complex numbers and one that takes them."""
    strategy = SDPipeStrategy(2, sync, partition=[2, 4]) if on_pipelines() else None
    trainer = pipelines(directory, strategy) if strategy else one_process(directory)
    module = Complex()
    trainer.fit(module, train_loader(), eval_loader())
    return {name: value for name, value in weights(module).items() if not name.endswith("sum") or not strategy}


@pytest.mark.distributed
@pytest.mark.parametrize("sync", [AllReduce(), SemiDecentralized(window=math.inf)], ids=["gradients", "models"])
def test_they_train_as_in_one_process(tmp_path: Path, sync: Any) -> None:
    whole = {name: value for name, value in _train(tmp_path).items() if not name.endswith("sum")}
    assert_same(on_four_ranks(_train, tmp_path, sync), whole)


@pytest.mark.distributed
def test_a_momentum_of_theirs_is_saved(tmp_path: Path) -> None:
    assert all(parts for parts in on_four_ranks(_train, tmp_path, DiLoCo(every=2)))
