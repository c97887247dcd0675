"""Shapes that change from batch to batch, and outputs whose shapes depend on the data."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.harness import assert_same, one_process, pipeline
from tests.workers import run_workers


class Positives(nn.Module):
    """Keeps the positive entries: the shape of its output depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class Sparse(L.LightningModule):
    """Takes sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 6), Positives(), nn.Tanh(), nn.Tanh())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)  # type: ignore[no-any-return]


@pytest.mark.distributed
@pytest.mark.parametrize("dynamic_shapes", [False, True])
def test_lengths_may_change_and_the_shape_of_an_output_may_depend_on_the_data(dynamic_shapes: bool) -> None:
    lengths = enumerate((5, 7, 5, 2))
    batches = [torch.randn(8, n, 3, generator=torch.Generator().manual_seed(n + i)) for i, n in lengths]
    expected = one_process(Sparse, batches, 4)
    assert_same(run_workers(2, pipeline, Sparse, batches, "1f1b", 2, 4, 1, None, dynamic_shapes), expected)
