"""Measuring the training throughput of a run."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.worker.phases import Phase


class ThroughputMeter(L.Callback):
    """Samples per second of all pipelines together, over whole training epochs without their validation, and the
    seconds of whole epochs with it.

    The first epoch warms up and does not count, unless it is the only one.
    """

    def __init__(self) -> None:
        self._epochs: list[tuple[float, float]] = []  # samples, seconds
        self._starts: list[float] = []

    @property
    def samples_per_second(self) -> float:
        counted = self._epochs[1:] or self._epochs
        return sum(samples for samples, _ in counted) / sum(seconds for _, seconds in counted)

    @property
    def epoch_seconds(self) -> list[float]:
        """From the beginning of an epoch to that of the next one, or to the end of training."""
        times = [end - start for start, end in pairwise(self._starts)]
        return times[1:] or times

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._samples = 0
        self._start = time.perf_counter()
        self._starts.append(self._start)
        self._validating = 0.0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(trainer.strategy, SDPipeStrategy)
        if trainer.strategy.training.phase is not Phase.ABSENT:  # when hooks are shown a batch that is not trained here
            self._samples += extract_batch_size(batch)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validating += time.perf_counter() - self._validation_start

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seconds = time.perf_counter() - self._start - self._validating
        mine = torch.tensor(float(self._samples), device=pl_module.device)
        samples = float(trainer.strategy.reduce(mine, reduce_op="sum"))  # pipelines may have trained unlike numbers
        self._epochs.append((samples, seconds))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._starts.append(time.perf_counter())
