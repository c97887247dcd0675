"""The stages of one pipeline compute what one process computes that accumulates over the same micro-batches."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.harness import assert_same, one_process, pipeline
from tests.workers import run_workers


class TiedModel(L.LightningModule):
    """Embedding and decoder share their weight; parameters of its own lie outside of every block, one of which nobody
    uses, and one the last stage only, in some batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 11)]
        )
        self.layers[-1].weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.ones(3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = layer(x) * self.scale
        return nn.functional.cross_entropy(x / self.temperature if y.sum() % 2 else x, y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return tuple(torch.randint(0, 11, (size,), generator=generator) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_micro_batches", "stages_per_worker"),
    [
        ("1f1b", 2, 1, 1),
        ("1f1b", 2, 2, 1),
        ("1f1b", 2, 4, 1),
        ("1f1b", 4, 4, 1),
        ("1f1b", 1, 2, 1),
        ("gpipe", 2, 4, 1),
        ("interleaved_1f1b", 2, 4, 2),
        ("zero_bubble", 2, 4, 2),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(
    schedule: str, num_stages: int, num_micro_batches: int, stages_per_worker: int
) -> None:
    batches = [batch(size) for size in (8, 8, 7, 8)]  # the third does not divide evenly
    expected = one_process(TiedModel, batches, num_micro_batches)
    arguments = (TiedModel, batches, schedule, num_stages, num_micro_batches, stages_per_worker)
    assert_same(run_workers(num_stages, pipeline, *arguments), expected)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), self.head(x)


class Unused(L.LightningModule):
    """A second output crosses the cut, which nobody uses behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3), TwoHeads(), nn.Linear(3, 3), nn.Linear(3, 1)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x, _ = self.layers[1](self.layers[0](batch))
        return self.layers[3](self.layers[2](x)).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_what_crosses_a_cut_and_is_not_used_gets_no_gradient(schedule: str) -> None:
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    stages_per_worker = 2 if schedule == "zero_bubble" else 1
    ranks = run_workers(2, pipeline, Unused, batches, schedule, 2, 2, stages_per_worker)
    assert_same(ranks, one_process(Unused, batches, 2))
