"""Models whose blocks hand on more than an output, with dropout and noise, and the models that people bring, on real
processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from tests.partition.architectures import build, words
from tests.pipeline.harness import Make, assert_same, one_process, pipeline
from tests.workers import run_workers


class Model(L.LightningModule):
    """Takes the mean of a batch's squares, and draws noise between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        loss: Tensor = (self(batch + noise) * torch.rand(1)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        outputs: Tensor = self(batch)
        return outputs


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3))


class UNet(Model):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([layer() for _ in range(3)])
        self.up = nn.ModuleList([layer() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.up:
            x = block(nn.functional.dropout(x, 0.1, self.training)) + skips.pop()
        return x


class Keeping(nn.Module):
    """Keeps a loss and a number of its own, and adds to what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layer()

    def forward(self, x: Tensor, values: list[Tensor], sums: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.body(x)
        self.loss, self.largest = y.square().mean(), y.detach().abs().max().item()
        values.append(y)
        sums["all"] = sums.get("all", torch.zeros(())) + y
        return y + values[0]


class KeepingModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Keeping() for _ in range(4)])
        self.hooked: list[Tensor] = []
        self.blocks[0].body.register_forward_hook(lambda *call: self.hooked.append(call[-1]))  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        values: list[Tensor] = []
        sums: dict[str, Tensor] = {}
        self.hooked.clear()
        for block in self.blocks:
            x = block(x, values, sums)
        kept = sum(block.loss * block.largest for block in self.blocks)
        return x + values[1] + sums["all"] + self.hooked[0] + kept


class Skipping(Model):
    """Skips blocks at random, as LayerDrop does, and the last ones in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([layer() for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if (torch.rand(()) < 0.4) if self.training else number > 3:
                continue
            x = block(x)
        return x


class Remembering(Model):
    """Keeps an early block's values over steps, and uses them with the last one's. The first blocks are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([layer() for _ in range(6)])
        self.bank: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[1](self.blocks[0](x))
        first = x = self.blocks[2](x)
        for block in self.blocks[3:]:
            x = block(x)
        x = x + sum(self.bank)
        self.bank.append(first.detach().mean(0))
        return x


class Counted(nn.Module):
    """Counts its calls, keeps what it was given, and has a running mean that each call makes anew."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = layer()
        self.calls = 0
        self.given: list[float] = []
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.given.append(x.mean().item())
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        y: Tensor = self.body(x)
        return y / self.calls + self.mean + sum(self.given)


class Counting(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Counted() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y


class Notes:
    __slots__ = ("calls", "values")

    def __init__(self) -> None:
        self.calls, self.values = 0, list[Tensor]()


class Noting(nn.Module):
    """Changes an object that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layer()

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        notes.calls += 1
        notes.values.append(x)
        y: Tensor = self.body(x) + notes.values[0]
        return y / notes.calls


class Passing(Model):
    """Its step changes its batch, which every stage of a worker is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Noting() for _ in range(4)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch.mul_(2), batch_idx)

    def forward(self, x: Tensor) -> Tensor:
        notes = Notes()
        for block in self.blocks:
            x = block(x, notes)
        return x * notes.calls


class Wrapped(L.LightningModule):
    """Around a model of Hugging Face transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).logits  # type: ignore[no-any-return]


def of_transformers(name: str, **options: Any) -> Make:
    return lambda: Wrapped(build(name, **options)[0])


def resnet() -> Wrapped:
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic")
    return Wrapped(ResNetForImageClassification(config))


def numbers(seed: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def images(seed: int) -> dict[str, Tensor]:
    pixels = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "labels": torch.arange(8) % 2}


CASES: list[tuple[Make, Callable[[int], Any]]] = [
    *((make, numbers) for make in (UNet, KeepingModel, Skipping, Remembering, Counting, Passing)),
    (of_transformers("BertForMaskedLM"), words),
    (of_transformers("GPT2LMHeadModel"), words),
    (resnet, images),
    (of_transformers("MixtralForCausalLM", output_router_logits=True), words),
    (of_transformers("BartForConditionalGeneration", encoder_layerdrop=0.2), words),
]
MOST = 9  # cases, without those whose rehearsals take long


def first_cases(rank: int, count: int, schedule: str, num_stages: int, stages_per_worker: int) -> list[Any]:
    return [
        pipeline(rank, make, [batch(seed) for seed in range(3)], schedule, num_stages, 4, stages_per_worker)
        for make, batch in CASES[:count]
    ]


@cache  # what every schedule is compared with
def whole(make: Make, batch: Callable[[int], Tensor], num_stages: int) -> Any:
    return one_process(make, [batch(seed) for seed in range(3)], 4, num_stages=num_stages)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("schedule", "num_stages", "stages_per_worker", "count"),
    [
        ("1f1b", 3, 1, len(CASES)),
        ("gpipe", 2, 1, MOST),
        ("interleaved_1f1b", 2, 2, MOST),
        ("zero_bubble", 2, 2, MOST),
    ],
)
def test_every_schedule_computes_what_one_process_does(
    schedule: str, num_stages: int, stages_per_worker: int, count: int
) -> None:
    expected = [whole(make, batch, num_stages * stages_per_worker) for make, batch in CASES[:count]]
    found = run_workers(num_stages, first_cases, count, schedule, num_stages, stages_per_worker)
    for number, outcome in enumerate(expected):
        assert_same([rank[number] for rank in found], outcome)
