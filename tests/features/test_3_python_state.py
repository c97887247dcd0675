"""What the end of a step, and of validation, changes in Python on last stages: the same on all stages afterwards."""

from __future__ import annotations

import os
import random
from collections import deque
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sdpipe import AllReduce, SDPipeStrategy
from tests.features.running import (
    Regression,
    assert_same,
    on_four_ranks,
    on_pipelines,
    refuse,
    samples,
    trainer_of_this_process,
    weights,
)
from tests.features.table import refused, supported

pytestmark = pytest.mark.distributed


class Phase(Enum):
    WARM = 0
    HOT = 1


class Annealing:
    """As schedules of a user's own are."""

    __slots__ = ("inner", "value")

    def __init__(self) -> None:
        self.value = 0.2
        self.inner = {"steps": [0]}

    def step(self) -> None:
        self.value /= 2
        self.inner["steps"].append(len(self.inner["steps"]))


class Meter:
    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, value: float) -> None:
        self.values.append(value)


class Changing(Regression):
    """Each value that the end of validation changes is used by the first block's stage in the next epoch, and hooks of
    all stages use what the end of a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.annealing, self.phase = 0.5, Annealing(), Phase.WARM
        self.seen, self.last = deque([1.0], maxlen=2), torch.zeros(6)
        self.draws, self.arrays, self.numbers = torch.Generator(), np.random.default_rng(1), random.Random(2)
        self.register_buffer("shift", torch.zeros(6))
        self.sum, self.mean, self.meter = 0.0, 1.0, Meter()

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        if self.training:
            x = x + self.noise + self.annealing.value + self.last + self.shift
            x = x * (1 + sum(self.seen)) if self.phase is Phase.HOT else x
            x = x + self.hparams["lr"] + len(self.annealing.inner["steps"])
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.sum += 1.0
        self.log("val_loss", loss)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.sum += 0.5

    def on_validation_epoch_end(self) -> None:
        draws = torch.randn(6, generator=self.draws) + float(self.arrays.random()) + self.numbers.random()
        if self.trainer.sanity_checking:
            return
        self.noise = self.sum / 100
        self.annealing.step()
        self.phase = Phase.HOT
        self.seen.append(self.noise)
        with torch.inference_mode():
            self.last = draws.clone()
        self.shift += 0.25
        self.hparams["lr"] = 0.05
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5
        self.net[2].requires_grad_(False)
        self.late = 3.0
        self.noise += self.late / 100

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        self.meter.add(loss.item())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.noise = 0.9 * self.noise + 0.1 * self.mean + 0.1 * self.meter.values[-1]

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.noise += getattr(self, "late", 100.0)


class Cooling(L.Callback):
    """Looks for what only last stages have at that time."""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if "val_loss" in trainer.callback_metrics:
            pl_module.cooled = 0.3  # type: ignore[assignment]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.noise += getattr(pl_module, "cooled", 0.0)


def _fit(directory: Path) -> tuple[dict[str, Tensor], list[Any]]:
    model = Changing()
    options: Any = {"callbacks": [Cooling()], "num_sanity_val_steps": 1, "use_distributed_sampler": False}
    if on_pipelines():
        options["strategy"] = SDPipeStrategy(2, AllReduce(), num_micro_batches=1)
    trainer = trainer_of_this_process(directory, **options)
    trainer.fit(model, DataLoader(samples(), 8), DataLoader(samples(16), 8))
    state = [model.noise, model.annealing.inner, model.phase, list(model.seen), model.numbers.random()]
    return weights(model), state


@supported("Callbacks", "attributes, learning rates, `requires_grad` and buffers that the end of an evaluation changes",
           "handed on from the last stage when the module's `on_validation_epoch_end` has run: numbers, strings, "
           "tensors, enumerations and random generators, in containers and objects of your own")  # fmt: skip
def test_what_the_end_of_validation_changes_is_the_same_on_all_stages(tmp_path: Path) -> None:
    ranks = on_four_ranks(_fit, tmp_path / "cut", count=2)
    expected, state = _fit(tmp_path / "whole")
    assert_same([rank[0] for rank in ranks], expected)
    for rank in ranks:
        assert rank[1] == pytest.approx(state) if isinstance(rank[1], float) else rank[1] == state
    assert not torch.equal(expected["net.0.weight"], Changing().state_dict()["net.0.weight"])


class Unpacked(Changing):
    """Keeps what does not travel, and uses it where the first block's stage would need it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = 1.0

    def on_validation_epoch_end(self) -> None:
        self.scale = complex(1.0, 0.0)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step((batch[0] * self.scale.real, batch[1]), batch_idx)


_ELSEWHERE = "what it is now does not travel to other stages"


@refused("Callbacks", "other objects that the end of an evaluation changes, where another stage uses them", _ELSEWHERE)
def test_what_does_not_travel_is_not_used_elsewhere(tmp_path: Path) -> None:
    loaders = DataLoader(samples(), 8), DataLoader(samples(16), 8)
    on_four_ranks(partial(refuse, loaders=loaders), tmp_path, Unpacked(), _ELSEWHERE, count=2)


class Unseeded(Regression):
    """Made in each process with numbers of its own, which the beginning and the end of a step use."""

    def __init__(self) -> None:
        super().__init__()
        if on_pipelines():
            seed = 10 + int(os.environ["RANK"])
            torch.manual_seed(seed)
            random.seed(seed)
        self.draws, self.numbers = torch.Generator().manual_seed(torch.seed() % 100), random.Random(random.random())
        self.turns, self.shifts = torch.randn(6), {"of": np.array([random.random()] * 6, np.float32)}
        self.order, self.ids = torch.randperm(6), {id(parameter): "" for parameter in self.parameters()}
        self.rank = int(os.environ.get("RANK", 0))
        self.register_buffer("scale", torch.randn(6))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        noise = torch.rand(6, generator=self.draws) + self.numbers.random()
        x = (batch[0] * self.turns * self.scale + torch.from_numpy(self.shifts["of"]) + noise)[:, self.order]
        return nn.functional.mse_loss(self.net(x), x.sum(1, keepdim=True))


def _unseeded(directory: Path) -> list[Any]:
    model = Unseeded()
    trainer = trainer_of_this_process(directory, max_epochs=1)
    trainer.fit(model, DataLoader(samples(), 8))
    values = [model.turns, torch.from_numpy(model.shifts["of"]), model.order, model.scale]
    assert all(id(parameter) in model.ids for parameter in model.parameters())
    return [*values, model.draws.get_state(), torch.tensor(model.numbers.random()), model.rank]


def test_what_processes_make_without_a_seed_is_the_same_on_all_stages(tmp_path: Path) -> None:
    last, first = on_four_ranks(_unseeded, tmp_path, count=2)
    assert (last.pop(), first.pop()) == (0, 1)
    for value, of_last in zip(first, last, strict=True):
        assert torch.equal(value, of_last)
