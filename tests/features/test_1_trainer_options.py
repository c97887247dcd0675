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
from torch import Tensor, nn

from tests.features.running import (
    Outcome,
    Regression,
    compare,
    eval_loader,
    fitted,
    train_loader,
    trainer_of_this_process,
    weights,
)
from tests.features.table import supported

pytestmark = pytest.mark.distributed


class Both(Regression):
    """Trains on two loaders at once, and validates with two in turn."""

    def training_step(self, batch: dict[str, tuple[Tensor, Tensor]], batch_idx: int) -> Tensor:  # type: ignore[override]
        x, y = (torch.cat(parts) for parts in zip(batch["a"], batch["b"], strict=True))
        return self.loss((x, y))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
        self.log("both", self.loss(batch))


class BuiltInSetup(Regression):
    """The same, of lazy modules."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def setup(self, stage: str) -> None:
        self.net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(8), nn.LazyLinear(1))
        self.net(torch.zeros(1, 6))
        self.net.load_state_dict(Regression().net.state_dict())


class Reloading(Regression):
    reloads = 0

    def train_dataloader(self) -> Any:
        self.reloads += 1
        return train_loader()

    def on_train_epoch_end(self) -> None:
        self.log("both", float(self.reloads))


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


_HALF: dict[str, Any] = {"limit_train_batches": 0.5, "limit_val_batches": 0.5}
_CAREFUL: dict[str, Any] = {"detect_anomaly": True, "deterministic": True, "inference_mode": False}
RUNS: dict[str, Callable[[Path], Outcome]] = {
    "few steps of what is built in setup": lambda path: fitted(path, BuiltInSetup(), max_steps=3, max_epochs=-1),
    "limited and careful": lambda path: fitted(path, **_HALF, **_CAREFUL),
    "fast": lambda path: fitted(path, fast_dev_run=2),
    "overfit": lambda path: fitted(path, overfit_batches=1),
    "steps": lambda path: fitted(path, check_val_every_n_epoch=None, val_check_interval=3, max_epochs=3),
    "bare": lambda path: fitted(path, barebones=True, logger=None, enable_checkpointing=None),
    "loaders": lambda path: fitted(
        path, Both(), ({"a": train_loader(), "b": train_loader(16)}, [eval_loader(), eval_loader(16)])
    ),
    "shortest": lambda path: fitted(
        path, Both(), (CombinedLoader({"a": train_loader(), "b": train_loader(16)}, "min_size"), eval_loader())
    ),
    "reloaded and validated rarely": lambda path: fitted(
        path, Reloading(), (None, eval_loader()), reload_dataloaders_every_n_epochs=1, check_val_every_n_epoch=2
    ),
    "watching": lambda path: fitted(
        path,
        Watching(),
        num_sanity_val_steps=2,
        callbacks=[RichProgressBar()],
        enable_model_summary=True,
        enable_progress_bar=True,
        logger=TensorBoardLogger(path, log_graph=True),
    ),
    "steering, and validated often": lambda path: fitted(path, Steering(), val_check_interval=0.25),
    "twice": _twice,
}


@supported("Trainer", "`fit`, with sanity validation", "the result of one process on the joined batch, to 1e-5")
@supported("Trainer", "a module that is built in `setup` or `configure_model`",
           "lazy modules must have run by then; `\"popen\"` alone leaves it in your process, too")  # fmt: skip
@supported("Trainer", "`limit_train_batches`, `limit_val_batches`, …")
@supported("Trainer", "`fast_dev_run`")
@supported("Trainer", "`overfit_batches`")
@supported("Trainer", "`max_steps`")
@supported("Trainer", "`val_check_interval`, `check_val_every_n_epoch`")
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
    compare(tmp_path, RUNS)
