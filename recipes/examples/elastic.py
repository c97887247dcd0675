"""Two pipelines that train for three minutes, of which you kill one: it comes back, with the state of the other.

    sdpipe run --pipelines 2 elastic.py        # in one terminal
    kill -9 PID                                # in another, with a PID that the first has printed

The first terminal then says, among the progress of the training (these lines are of one run):

    sdpipe: pipeline 1 is process 3789
    sdpipe: pipeline 1 lost (stage 0 killed); 1 of 2 go on
    sdpipe: pipeline 1 is process 4036 (restart 1)
    sdpipe: pipeline 1 is back after 7.9 s, at update 1439
    sdpipe: pipelines were lost 1 time and came back 1 time, after 7.9 s in all

``sdpipe serve`` shows it in a browser meanwhile; ``elastic.py 10`` trains for ten seconds.
"""

import sys
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import SDPipeStrategy


class Sums(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    torch.manual_seed(0)  # every pipeline has the same data
    x = torch.randn(16384, 256)
    data = DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=64, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=SDPipeStrategy(),
        max_epochs=1000,
        max_time=timedelta(seconds=float(sys.argv[1]) if len(sys.argv) > 1 else 180),
        callbacks=[L.pytorch.callbacks.ModelCheckpoint(Path("checkpoints"), save_last=True)],  # for sdpipe run --resume
        logger=False,
    )
    trainer.fit(Sums(), data)
