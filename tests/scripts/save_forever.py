"""Saves a checkpoint of a large model again and again under one name, and prints how many it has saved."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sdpipe import AllReduce, SDPipeStrategy
from tests.features.running import quiet_trainer


class Large(L.LightningModule):
    """All its weights are the number of steps."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.net = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(8)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)

    def on_train_batch_end(self, outputs: object, batch: Tensor, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(self.global_step)
        self.trainer.save_checkpoint(self.path)
        if self.global_rank == 0:
            print(self.global_step, flush=True)


def main(path: Path, distributed: bool) -> None:
    trainer = quiet_trainer(
        devices=2,
        strategy=SDPipeStrategy(2, AllReduce(), start_method="fork", save_distributed_checkpoint=distributed),
        max_epochs=1,
        enable_checkpointing=False,
    )
    trainer.fit(Large(path), DataLoader(torch.zeros(1000, 1000), 2))
