"""Shapes that change from batch to batch, dropout, and outputs that depend on the data."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.harness import assert_same, one_process, pipeline
from tests.workers import run_workers


class Recurrent(L.LightningModule):
    """Takes sequences of any length; drops out if asked to."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(3, 6), nn.Dropout(dropout), nn.Linear(6, 6), nn.Dropout(dropout), nn.Linear(6, 2)]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)  # type: ignore[no-any-return]


def dropping() -> Recurrent:
    return Recurrent(dropout=0.5)


class Positives(nn.Module):
    """Keeps the positive entries: the shape of its output depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class Sparse(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), Positives(), nn.Tanh(), nn.Tanh())


def sequences(*lengths: int) -> list[Tensor]:
    return [torch.randn(8, n, 3, generator=torch.Generator().manual_seed(n + i)) for i, n in enumerate(lengths)]


@pytest.mark.distributed
def test_lengths_may_change_from_batch_to_batch() -> None:
    batches = sequences(5, 7, 5, 2)
    expected = one_process(Recurrent, batches, 4)
    assert_same(run_workers(2, pipeline, Recurrent, batches, "1f1b", 2, 4), expected)


@pytest.mark.distributed
def test_dropout_is_the_same_for_the_same_seed() -> None:
    batches = sequences(5, 5)
    first, second = (run_workers(2, pipeline, dropping, batches, "1f1b", 2, 4) for _ in range(2))
    for one, other in zip(first[0][0], second[0][0], strict=True):
        assert torch.equal(one[0], other[0])
    assert not torch.equal(first[0][0][0][0], one_process(Recurrent, batches, 4)[0][0][0]), "nothing was dropped"


@pytest.mark.distributed
@pytest.mark.parametrize("dynamic_shapes", [False, True])
def test_the_shape_of_an_output_may_depend_on_the_data(dynamic_shapes: bool) -> None:
    batches = sequences(5, 5)
    expected = one_process(Sparse, batches, 4)
    assert_same(run_workers(2, pipeline, Sparse, batches, "1f1b", 2, 4, 1, None, dynamic_shapes), expected)
