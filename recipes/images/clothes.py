"""A small network for Fashion-MNIST."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from recipes.classifier import Classifier
from recipes.digits import ResidualBlock


class ClothesResNet(Classifier):
    """A residual network for grey pictures of 28 × 28 pixels in ten classes, trained with SGD over one cycle of the
    learning rate.

    Three convolutions halve the resolution; a residual block follows the second and the third. With eight channels it
    has 29,490 parameters.

    Args:
        channels: channels of the first convolution; the next two have twice and four times as many.
        lr: the largest learning rate of the cycle, which spans the whole training.
        momentum: momentum of SGD.
        weight_decay: weight decay of SGD.
    """

    def __init__(self, channels: int = 8, lr: float = 0.2, momentum: float = 0.9, weight_decay: float = 5e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            _halving(1, channels),
            _halving(channels, 2 * channels),
            ResidualBlock(2 * channels),
            _halving(2 * channels, 4 * channels),
            ResidualBlock(4 * channels),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * channels, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        chosen = {name: self.hparams[name] for name in ("lr", "momentum", "weight_decay")}
        optimizer = torch.optim.SGD(self.parameters(), **chosen)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, chosen["lr"], steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _halving(given: int, channels: int) -> nn.Module:
    convolution = nn.Conv2d(given, channels, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
