"""The figures of a run, in a file."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist

from lightning_sdpipe import SDPipeStrategy
from recipes.throughput import ThroughputMeter


class Summary(L.Callback):
    """Written by rank 0 at the end of training, which may be in another process than the one that asked for it.

    Args:
        path: of the file.
        meter: of the same run.
    """

    def __init__(self, path: Path, meter: ThroughputMeter) -> None:
        self._path = path
        self._meter = meter
        self._start = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        strategy = trainer.strategy
        assert isinstance(strategy, SDPipeStrategy)
        figures = {
            "workers": dist.get_world_size(),
            "samples_per_second": self._meter.samples_per_second,
            "epoch_seconds": self._meter.epoch_seconds,
            "mean_group_size": strategy.statistics.mean_group_size,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "seconds": time.perf_counter() - self._start,
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        self._path.write_text(json.dumps(figures, indent=2))

    def read(self) -> dict[str, Any]:
        figures: dict[str, Any] = json.loads(self._path.read_text())
        return figures
