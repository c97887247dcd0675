"""As a user writes it, for mypy: nothing runs it."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import (
    Balanced,
    ConfigurationError,
    EightBit,
    Exchange,
    SDPipeStrategy,
    SDPipeWeightAveraging,
    SemiDecentralized,
)
from lightning_sdpipe.heterogeneity import Static
from lightning_sdpipe.optim import VarianceCorrection


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return VarianceCorrection(torch.optim.AdamW(self.parameters()), num_workers=2)


class Averages(SDPipeWeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 5 == 0


strategy = SDPipeStrategy(
    2,
    SemiDecentralized(window=0.1),
    partition=Balanced(),
    exchange=Exchange(EightBit(), overlap="step"),
    delays=Static(factors=(1.0, 2.0)),
)
stages: int = strategy.num_stages
sent: int = strategy.statistics.bytes_sent
trainer = L.Trainer(strategy=strategy, callbacks=[Averages(decay=0.9)])
try:
    trainer.fit(Model(), DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1)), 2))
except ConfigurationError as error:
    print(error)
