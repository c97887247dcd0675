from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_sdpipe.loop.dealt import announcement, batch_to_show


class Module(L.LightningModule):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_train_epoch_end(self) -> None: ...


class EveryTenth(L.Callback):
    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None: ...


class AtTheEnd(L.Callback):
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None: ...


def test_hooks_that_are_told_the_number_of_a_batch_are_named() -> None:
    line = announcement(False, Module(), [EveryTenth(), AtTheEnd(), ModelCheckpoint(), LearningRateMonitor()])
    hooks = "Module.on_train_batch_end, EveryTenth.on_train_batch_start"
    assert f"{hooks} see the batch_idx of their own pipeline's batches" in line
    assert "(data='sharded' gives each pipeline a shard instead)" in line
    assert "AtTheEnd" not in line
    assert "Monitor" not in line


def test_without_such_hooks_the_line_is_short() -> None:
    line = announcement(True, L.LightningModule(), [AtTheEnd()])
    assert "batch_idx" not in line
    assert "as data='dealt' and elastic runs require" in line


class Noisy(Dataset[float]):
    """Draws from generators of its own, and counts."""

    def __init__(self) -> None:
        self.generator, self.numbers = torch.Generator().manual_seed(3), np.random.default_rng(3)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        self.asked.append(index)
        return torch.rand((), generator=self.generator).item() + self.numbers.random()


def test_a_batch_that_is_only_shown_leaves_the_data_set_as_it_was() -> None:
    data = Noisy()
    loader = DataLoader(data, 4)
    assert torch.equal(batch_to_show(loader), batch_to_show(loader))
    assert data.asked == []
