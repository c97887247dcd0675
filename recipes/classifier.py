"""Common base of models that classify pictures."""

from __future__ import annotations

import lightning as L
from torch import Tensor
from torch.nn import functional as F


class Classifier(L.LightningModule):
    """Trains on the cross-entropy of the scores that ``forward`` returns, and logs loss and accuracy."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        scores = self(images)
        self.log("val_loss", F.cross_entropy(scores, labels))
        self.log("val_accuracy", (scores.argmax(-1) == labels).float().mean(), prog_bar=True)
