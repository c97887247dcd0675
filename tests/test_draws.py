"""Random numbers in the step, around it and in the blocks: the same wherever the model is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import NoSync, SDPipeStrategy


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)) * random.random())


class Noisy(L.LightningModule):
    """Draws before the step, in the step between blocks, within blocks, and in recomputed ones."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.file, self.losses = file, list[Tensor]()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.randn(4)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * float(np.random.rand())]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] + 0.1 * torch.randn_like(batch[0])
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number % 2 else layer(x)
            x = nn.functional.dropout(x, 0.1)
        return (x * torch.rand(())).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"])

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            torch.save(torch.stack(self.losses), self.file)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.distributed
@pytest.mark.parametrize("pipelines", [1, 2])
def test_losses_are_the_same_wherever_the_model_is_cut(tmp_path: Path, pipelines: int) -> None:
    losses = []
    for stages in (1, 2, 4) if pipelines == 1 else (1, 2):
        L.seed_everything(3, verbose=False)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=stages * pipelines,
            strategy=SDPipeStrategy(stages, sync=NoSync(), data="sharded", num_micro_batches=4, start_method="fork"),
            max_epochs=2,
            logger=False,
            **{f"enable_{name}": False for name in ("checkpointing", "progress_bar", "model_summary")},
        )
        data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
        trainer.fit(Noisy(tmp_path / f"{stages}.pt"), DataLoader(data, 8, shuffle=True))
        losses.append(torch.load(tmp_path / f"{stages}.pt"))
    assert len(losses[0]) == 8 // pipelines
    assert len(set(losses[0].tolist())) > 1
    assert all(torch.equal(found, losses[0]) for found in losses[1:])
