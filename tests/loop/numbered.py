"""Samples with numbers, a layer that takes its time, and what the ranks of a training write down."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Samples that say which they are; ``beside`` gives their second feature."""

    def __init__(self, size: int, beside: Callable[[int], float] | None = None) -> None:
        self.size, self.beside = size, beside

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index / self.size, self.beside(index) if self.beside else 0.5]), torch.tensor(index)


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.seconds)
        return x


def records_of(directory: Path, ranks: int) -> list[dict[str, Any]]:
    """What the diary of each rank wrote."""
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(ranks)]
