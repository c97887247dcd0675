"""Callbacks of the training app: a file with a run's figures, and a picture of its losses and accuracies."""

from __future__ import annotations

import json
import resource
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.worker.training import Phase
from recipes.suites.figures import plot
from recipes.suites.grid import Row


class Summary(L.Callback):
    """Writes a run's figures to a file, on rank 0 at the end of training, since rank 0 may be another process than the
    one that reads them.

    Samples per second are those of all pipelines together, over whole training epochs without their validation; an
    epoch's seconds include it. The first epoch warms up and does not count, unless it is the only one.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begun = time.perf_counter()
        self._epochs: list[tuple[float, float]] = []  # samples, seconds
        self._starts: list[float] = []
        self._samples, self._validating = 0, 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._samples, self._validating = 0, 0.0
        self._starts.append(time.perf_counter())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(trainer.strategy, SDPipeStrategy)
        if trainer.strategy.training.phase is not Phase.ABSENT:  # ABSENT: hooks see a batch that is not trained here
            self._samples += extract_batch_size(batch)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validating -= 0.0 if trainer.sanity_checking else time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validating += 0.0 if trainer.sanity_checking else time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seconds = time.perf_counter() - self._starts[-1] - self._validating
        mine = torch.tensor(float(self._samples), device=pl_module.device)
        samples = float(trainer.strategy.reduce(mine, reduce_op="sum"))  # pipelines may have trained different numbers
        self._epochs.append((samples, seconds))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        now, strategy = time.perf_counter(), trainer.strategy
        if not trainer.is_global_zero:
            return
        assert isinstance(strategy, SDPipeStrategy)
        times = [end - start for start, end in pairwise([*self._starts, now])]
        counted = self._epochs[1:] or self._epochs
        figures = {
            "workers": dist.get_world_size(),
            "samples_per_second": sum(samples for samples, _ in counted) / sum(seconds for _, seconds in counted),
            "epoch_seconds": times[1:] or times,
            "mean_group_size": strategy.statistics.mean_group_size,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "seconds": now - self._begun,
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        self._path.write_text(json.dumps(figures, indent=2))

    def read(self) -> dict[str, Any]:
        figures: dict[str, Any] = json.loads(self._path.read_text())
        return figures


class TrainingCurve(L.Callback):
    """Draws losses and accuracies over the steps, on rank 0 when training ends or fails.

    Args:
        file: file for the figure; its suffix gives the format.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rows: list[Row] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._note(trainer, "train_loss_step")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._note(trainer, "val_loss", "val_accuracy")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._draw(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._draw(trainer)

    def _note(self, trainer: L.Trainer, *names: str) -> None:
        for name in names:
            if name in trainer.callback_metrics:
                kind, value = "accuracy" if "accuracy" in name else "loss", float(trainer.callback_metrics[name])
                what = name.replace("_step", "").replace("_", " ")
                self._rows.append({"what": what, "steps": trainer.global_step, kind: value})

    def _draw(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and self._rows:
            plot(self._rows, self._file, x="steps", y=["loss", "accuracy"], kinds=(self._file.suffix,))
