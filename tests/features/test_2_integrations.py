"""Loggers of other packages, without their services: the extra ``integrations``, in ``make test-all``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

from tests.features.running import Regression, eval_loader, on_four_ranks, pipelines, train_loader
from tests.features.table import supported

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _wandb(directory: Path) -> Any:
    return WandbLogger(save_dir=directory, offline=True, project="pipelines")


def _mlflow(directory: Path) -> Any:
    return MLFlowLogger("pipelines", tracking_uri=f"file:{directory / 'mlruns'}")


def _logged(directory: Path, logger: Callable[[Path], Any]) -> None:
    directory.mkdir(exist_ok=True)
    trainer = pipelines(directory, logger=logger(directory), log_every_n_steps=1, max_epochs=1)
    trainer.fit(Regression(), train_loader(), eval_loader())


@supported("Logging", "`WandbLogger(offline=True)`", "rank 0 alone begins a run")
@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb, of the extra integrations")
def test_wandb(tmp_path: Path) -> None:
    on_four_ranks(_logged, tmp_path, _wandb, timeout=100)
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert b"val_loss" in next(run.glob("*.wandb")).read_bytes()


@supported("Logging", "`MLFlowLogger` with a directory", "rank 0 alone begins a run")
@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow, of the extra integrations")
def test_mlflow(tmp_path: Path) -> None:
    on_four_ranks(_logged, tmp_path, _mlflow, timeout=100)
    (metric,) = (tmp_path / "mlruns").glob("*/*/metrics/val_loss")
    assert len(metric.read_text().splitlines()) == 1
