"""Pipelines that may be killed, and come back: ``sdpipe run --pipelines 2 elastic.py``; kill one of its processes."""

from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import SDPipeStrategy


class Sums(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    torch.manual_seed(0)  # every pipeline has the same data
    x = torch.randn(512, 16)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32, shuffle=True)
    checkpoints = L.pytorch.callbacks.ModelCheckpoint(Path("checkpoints"), save_last=True)  # for sdpipe run --resume
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=SDPipeStrategy(), max_epochs=2, callbacks=[checkpoints], logger=False
    )
    trainer.fit(Sums(), data)
