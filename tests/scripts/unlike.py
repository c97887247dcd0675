"""A training of two pipelines, of one stage and of two, for ``sdpipe run``: it ends with an epoch, once there
is that file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import SDPipeStrategy


class Model(L.LightningModule):
    def __init__(self, end: Path) -> None:
        super().__init__()
        self.end = end
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        time.sleep(0.01)
        return self.net(batch[0]).pow(2).mean()

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop |= self.end.exists()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def main(end: Path) -> None:
    torch.set_num_threads(1)
    strategy = SDPipeStrategy(num_stages=[1, 2], partition=[[3], [1, 2]])
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(accelerator="cpu", strategy=strategy, max_epochs=-1, **quiet)
    trainer.fit(Model(end), DataLoader(TensorDataset(torch.linspace(0, 1, 1024).view(256, 4)), 4))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
