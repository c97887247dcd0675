"""ResNets of transformers as a LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import ResNetConfig, ResNetForImageClassification

from recipes.classifier import Classifier


class ResNet(Classifier):
    """ResNet-50, or another ResNet, trained with SGD.

    The learning rate rises over the first epochs, and later falls by a factor at regular intervals.

    Args:
        network: settings of transformers' ``ResNetConfig`` that differ from ResNet-50's with 1000 classes.
        lr: the learning rate after the warm-up.
        momentum: momentum of SGD.
        weight_decay: weight decay of SGD.
        warmup_epochs: epochs over which the learning rate rises from zero.
        decay_epochs: number of epochs after which, each time, the learning rate is multiplied by ``decay``.
        decay: a factor below 1.
    """

    def __init__(
        self,
        network: Mapping[str, Any],
        lr: float = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        warmup_epochs: int = 1,
        decay_epochs: int = 30,
        decay: float = 0.2,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = ResNetForImageClassification(ResNetConfig(**{"num_labels": 1000, **network}))

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes for pictures of any size; a grey picture gets three equal channels."""
        scores: Tensor = self.network(images.expand(-1, 3, -1, -1)).logits
        return scores

    def configure_optimizers(self) -> OptimizerLRScheduler:
        chosen = {name: self.hparams[name] for name in ("lr", "momentum", "weight_decay")}
        optimizer = torch.optim.SGD(self.parameters(), **chosen)
        _ = self.trainer.estimated_stepping_batches  # counts the batches of an epoch
        epoch = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
        course = [self.hparams[name] for name in ("warmup_epochs", "decay_epochs", "decay")]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: relative_rate((step + 1) / epoch, *course))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def relative_rate(epochs: float, warmup_epochs: int, decay_epochs: int, decay: float) -> float:
    """Return the ratio of the learning rate after ``epochs`` to its largest value; other arguments as for
    :class:`ResNet`."""
    rise = epochs / warmup_epochs if warmup_epochs else 1.0
    return min(1.0, rise) * decay ** int(epochs // decay_epochs)
