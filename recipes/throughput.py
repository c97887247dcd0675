"""Measuring the training throughput of a run."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from lightning.pytorch.utilities.data import extract_batch_size


class ThroughputMeter(L.Callback):
    """Samples per second of all pipelines together, over whole training epochs without their validation.

    The first epoch warms up and does not count, unless it is the only one.

    Args:
        num_pipelines: each sees a batch of its own at every step.
    """

    def __init__(self, num_pipelines: int) -> None:
        self._num_pipelines = num_pipelines
        self._epochs: list[tuple[int, float]] = []  # samples, seconds

    @property
    def samples_per_second(self) -> float:
        counted = self._epochs[1:] or self._epochs
        return sum(samples for samples, _ in counted) / sum(seconds for _, seconds in counted)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._samples = 0
        self._start = time.perf_counter()
        self._validating = 0.0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += extract_batch_size(batch) * self._num_pipelines

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validating += time.perf_counter() - self._validation_start

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._epochs.append((self._samples, time.perf_counter() - self._start - self._validating))
