"""A picture of how training went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

Points = list[tuple[int, float]]  # after so many steps, a value


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
