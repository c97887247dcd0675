"""Options of the Trainer and kinds of loaders, each against one process; all in the same processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from tests.features.running import (
    Regression,
    assert_same,
    eval_loader,
    on_four_ranks,
    train_loader,
    trainer_of_this_process,
    weights,
)
from tests.features.table import supported

pytestmark = pytest.mark.distributed

Outcome = tuple[dict[str, Tensor], dict[str, float], list[Any]]  # weights, metrics, and what must be equal everywhere


def _fit(directory: Path, module: Regression | None = None, loaders: Any = None, **options: Any) -> Outcome:
    trainer, module = trainer_of_this_process(directory, **options), module or Regression()
    train, val = loaders or (train_loader(), eval_loader())
    trainer.fit(module, train, val)
    metrics = {
        k: float(v)
        for k, v in trainer.callback_metrics.items()
        if k in ("loss_epoch", "val_loss") or k.startswith("both")
    }
    return weights(module), metrics, [trainer.global_step, trainer.current_epoch]


class Both(Regression):
    """Trains on two loaders at once, and validates with two in turn."""

    def training_step(self, batch: dict[str, tuple[Tensor, Tensor]], batch_idx: int) -> Tensor:  # type: ignore[override]
        x, y = (torch.cat(parts) for parts in zip(batch["a"], batch["b"], strict=True))
        return self.loss((x, y))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
        self.log("both", self.loss(batch))


class Reloading(Regression):
    reloads = 0

    def train_dataloader(self) -> Any:
        self.reloads += 1
        return train_loader()


def _reload(directory: Path) -> Outcome:
    trainer, module = trainer_of_this_process(directory, reload_dataloaders_every_n_epochs=1), Reloading()
    trainer.fit(module)
    return weights(module), {}, [module.reloads]


class Watching(Regression):
    """Reads the loss in hooks, and decides by it; has an example that nobody can run through the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.randn(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_before_backward(self, loss: Tensor) -> None:
        assert loss > 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs["loss"] < 1e-3:
            self.trainer.should_stop = True


class Steering(Regression):
    """Looks at what Lightning makes after the cut, and at what a block of another stage left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1].register_forward_hook(self._remember)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rate, following = self.optimizers().param_groups[0]["lr"], self.lr_schedulers().get_last_lr()[0]
        self.log("rate", rate + following)
        return super().training_step(batch, batch_idx) + 0.1 * self.remembered.square().mean()

    def _remember(self, block: Any, inputs: Any, output: Tensor) -> None:
        self.remembered = output

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def _twice(directory: Path) -> Outcome:
    """Fits, goes on fitting, and tests the best of what was saved."""
    best = ModelCheckpoint(directory, monitor="val_loss", filename="{epoch}")
    trainer, module = trainer_of_this_process(directory, max_epochs=1, callbacks=[best]), Regression()
    (before,) = trainer.validate(module, eval_loader(), verbose=False)
    trainer.fit(module, train_loader(), eval_loader())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, train_loader(), eval_loader())
    (tested,) = trainer.test(module, eval_loader(), ckpt_path="best", verbose=False)
    metrics = {"before": before["val_loss"], **tested} if trainer.is_global_zero else {}
    return weights(module), metrics, [trainer.global_step, Path(best.best_model_path).name]


RUNS: dict[str, Callable[[Path], Outcome]] = {
    "steps": lambda path: _fit(path, check_val_every_n_epoch=None, val_check_interval=3, max_epochs=3),
    "careful": lambda path: _fit(path, detect_anomaly=True, deterministic=True, inference_mode=False),
    "bare": lambda path: _fit(path, barebones=True, logger=None, enable_checkpointing=None),
    "loaders": lambda path: _fit(
        path, Both(), ({"a": train_loader(), "b": train_loader(16)}, [eval_loader(), eval_loader(16)])
    ),
    "shortest": lambda path: _fit(
        path, Both(), (CombinedLoader({"a": train_loader(), "b": train_loader(16)}, "min_size"), eval_loader())
    ),
    "reload": _reload,
    "watching": lambda path: _fit(
        path,
        Watching(),
        callbacks=[RichProgressBar()],
        enable_model_summary=True,
        enable_progress_bar=True,
        logger=TensorBoardLogger(path, log_graph=True),
    ),
    "steering": lambda path: _fit(path, Steering()),
    "twice": _twice,
}


def _all(directory: Path) -> dict[str, Outcome]:
    return {name: run(directory / name) for name, run in RUNS.items()}


@supported(
    "Trainer",
    "`check_val_every_n_epoch=None`, `detect_anomaly`, `deterministic`, `inference_mode=False`, "
    "`barebones`, `reload_dataloaders_every_n_epochs`",
)
@supported(
    "Trainer",
    "several loaders for training (`CombinedLoader`) and for validation",
    "`split_batch` is needed where their batch sizes differ",
)
@supported("Trainer", '`fit` again, and `test(ckpt_path="best")` after it')
@supported(
    "Trainer",
    "the loss in `on_before_backward` and `on_train_batch_end`",
    'of the rank\'s own pipeline, on all its stages; with `schedule="pipedream"` on the last one, and `nan` on others',
)
@supported("Trainer", "`self.optimizers()`, `self.lr_schedulers()` in steps", "to look at")
@supported("Trainer", "`example_input_array`", "left out with a warning: no sizes in the summary, no graph in loggers")
def test_options(tmp_path: Path) -> None:
    ranks, alone = on_four_ranks(_all, tmp_path / "four"), _all(tmp_path / "one")
    for name, (expected, metrics, equal) in alone.items():
        assert_same([rank[name][0] for rank in ranks], expected)
        assert not torch.equal(expected["net.0.weight"], Regression().net[0].weight), name
        assert ranks[0][name][1] == pytest.approx(metrics, rel=1e-5), name
        assert all(rank[name][2] == equal for rank in ranks), name
