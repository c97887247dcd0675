"""Callbacks of the training app: the throughput of a run, the file with its figures, and a picture of how it went."""

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
from lightning_sdpipe.worker.phases import Phase

Points = list[tuple[int, float]]  # after so many steps, a value


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


class Summary(L.Callback):
    """The figures of a run, in a file that rank 0 writes at the end of training: it may be in another process than the
    one that asked for them.

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


class TrainingCurve(L.Callback):
    """Draws losses and accuracies over the steps, on rank 0 when training ends or fails.

    Args:
        file: for the figure; its suffix says the format.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._curves: dict[str, Points] = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._note(trainer, ("train_loss_step",))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._note(trainer, ("val_loss", "val_accuracy"))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._draw(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._draw(trainer)

    def _note(self, trainer: L.Trainer, names: tuple[str, ...]) -> None:
        for name in names:
            if name in trainer.callback_metrics:
                self._curves.setdefault(name, []).append((trainer.global_step, float(trainer.callback_metrics[name])))

    def _draw(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and self._curves:
            draw(self._curves, self._file)


def draw(curves: dict[str, Points], file: Path) -> None:
    """Each curve over the steps: accuracies in a panel of their own, below the losses."""
    from matplotlib.figure import Figure

    accuracies = [name for name in curves if "accuracy" in name]
    panels = [panel for panel in ([name for name in curves if name not in accuracies], accuracies) if panel]
    figure = Figure(figsize=(7, 3.5 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
    for axis, names in zip(axes, panels, strict=True):
        for name in names:
            steps, values = zip(*curves[name], strict=True)
            axis.plot(steps, values, label=name.replace("_step", "").replace("_", " "), marker=".")
        axis.set_ylabel("accuracy" if names is accuracies else "loss")
        axis.grid(alpha=0.3)
        axis.legend()
    axes[-1].set_xlabel("steps")
    figure.savefig(file, dpi=150)
