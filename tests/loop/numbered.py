"""Samples with numbers, a layer that takes its time, and what the ranks of a training write down."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import Dataset


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Samples that say which they are; their second feature is ``beside``, or what it gives."""

    def __init__(self, size: int, beside: Callable[[int], float] | float = 0.5) -> None:
        self.size, self.beside = size, beside

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        beside = self.beside(index) if callable(self.beside) else self.beside
        return torch.tensor([index / self.size, beside]), torch.tensor(index)


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.seconds)
        return x


class Diary(Callback):
    """Writes down, on every rank, what was trained and what happened when."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[Any] = []
        self.rates: list[float] = []
        self.steps: list[int] = []
        self.saved: list[int] = []
        self.sizes: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.steps.append(trainer.global_step)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.events.append(["validation", trainer.global_step, trainer.fit_loop.epoch_loop.batch_idx])

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.events.append(["epoch", trainer.global_step])

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.events.append(["checkpoint", trainer.global_step])
        self.saved.append(len(module.seen))  # type: ignore[arg-type]

    def on_fit_end(self, trainer: L.Trainer, module: Any) -> None:
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        training = getattr(trainer.strategy, "training", None)  # one process has none
        record = {
            "seen": module.seen,
            "events": self.events,
            "rates": self.rates,
            "saved": self.saved,
            "sizes": self.sizes,
            "updates": training and training.updates,
            "source": training and trainer.strategy._batches.description,  # type: ignore[attr-defined]
            "rejoined": training and getattr(training.rendezvous, "rejoined", 0),
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "steps": [*self.steps, trainer.global_step],
            "schedule": [(each.last_epoch, each.get_last_lr()) for each in schedules],
            "weights": {name: value.tolist() for name, value in module.state_dict().items() if not value.is_meta},
        }
        (self.directory / f"{trainer.global_rank}.json").write_text(json.dumps(record))


def records_of(directory: Path, ranks: int) -> list[dict[str, Any]]:
    """What the diary of each rank wrote."""
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(ranks)]
