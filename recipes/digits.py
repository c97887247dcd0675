"""The small demonstration: handwritten digits and a residual network, without anything from this project."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from recipes.classifier import Classifier
from recipes.loaders import Loaders


class ResidualBlock(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class DigitsResNet(Classifier):
    """A small residual network for 8 × 8 grey images in ten classes."""

    def __init__(self, channels: int = 32, depth: int = 4, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
            *[ResidualBlock(channels) for _ in range(depth)],
            nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=self.hparams["momentum"])


class Digits(Loaders):
    """scikit-learn's 1797 handwritten digits, 8 × 8 pixels: 1437 to train on, 360 to validate."""

    def __init__(self, batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__(batch_size, num_workers)

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, val = order[:1437], order[1437:]
        self.train = TensorDataset(images[train], labels[train])
        self.val = TensorDataset(images[val], labels[val])
