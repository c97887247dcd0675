"""The stages of one pipeline compute what one process computes that accumulates over the same micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from lightning_sdpipe.pipeline.flush import CutStage, run_ahead, skip_initialisation
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


class NegativeIsUnused(L.LightningModule):
    """The loss of a negative batch uses nothing that crosses a cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
        self.side = nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        side, output = self.side(batch).square().mean(), self.layers(batch).square().mean()
        return side if batch.max() < 0 else side + output  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("make", [Unused, NegativeIsUnused])
def test_what_crosses_a_cut_and_is_not_used_gets_no_gradient(make: type[L.LightningModule], schedule: str) -> None:
    batch = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
    stages_per_worker = 2 if schedule == "zero_bubble" else 1
    ranks = run_workers(2, pipeline, make, [batch, -batch], schedule, 2, 2, stages_per_worker)
    assert_same(ranks, one_process(make, [batch, -batch], 2))


class Recorder(CutStage):
    """A stage that only notes what it is asked for, and with which loss."""

    def __init__(self, stage: int, num_stages: int) -> None:
        link: Any = SimpleNamespace(device=torch.device("cpu"), group=None)
        super().__init__(nn.Module(), stage, num_stages, num_stages, link)
        self.asked: list[object] = []

    def forward_one_chunk(self, index: int, *_: Any, **__: Any) -> Tensor | None:
        self.asked.append(index)
        return torch.tensor(float(index)) if self.is_last else None

    def backward_one_chunk(self, index: int, loss: Tensor | None = None, *_: Any, **__: Any) -> None:
        self.asked.append((index, None if loss is None else float(loss)))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_the_orders_of_one_stage_are_those_of_torch(num_stages: int) -> None:
    for parts in range(1, 9):
        for stage in range(num_stages):
            for kind, ahead in ((Schedule1F1B, num_stages - stage), (ScheduleGPipe, parts)):
                if kind is Schedule1F1B and parts < num_stages:
                    continue
                ours, theirs = Recorder(stage, num_stages), Recorder(stage, num_stages)
                run_ahead(ours, parts, ahead)
                schedule = kind(theirs, parts, loss_fn=lambda loss, _: loss, scale_grads=False)  # type: ignore[arg-type]
                skip_initialisation(schedule)
                try:
                    schedule.step(target=torch.arange(parts), return_outputs=False)
                except ValueError:  # torch 2.9 wants a micro-batch for every stage
                    assert parts < num_stages
                    continue
                assert ours.asked == theirs.asked
