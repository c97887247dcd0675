"""Loggers of other packages, without their services: the extra ``integrations``, in ``make test-all``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from tests.features.running import Regression, eval_loader, on_four_ranks, pipelines, train_loader
from tests.features.table import supported

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _wandb(directory: Path) -> None:
    import wandb

    _fit(directory, WandbLogger(save_dir=directory, offline=True, project="pipelines"))
    wandb.finish()  # a forked process ends without what wandb does at the end of Python


def _mlflow(directory: Path) -> None:
    _fit(directory, MLFlowLogger("pipelines", tracking_uri=_database(directory)))


def _database(directory: Path) -> str:
    return f"sqlite:///{directory / 'mlflow.db'}"


def _fit(directory: Path, logger: Logger) -> None:
    trainer = pipelines(directory, logger=logger, log_every_n_steps=1, max_epochs=1)
    trainer.fit(Regression(), train_loader(), eval_loader())


@supported("Logging", "`WandbLogger(offline=True)`", "rank 0 alone begins a run")
@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb, of the extra integrations")
def test_wandb(tmp_path: Path) -> None:
    on_four_ranks(_wandb, tmp_path)
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert b"val_loss" in next(run.glob("*.wandb")).read_bytes()


@supported(
    "Logging", "`MLFlowLogger` with a database", "rank 0 alone begins a run; a SQLite file must have its tables before"
)
@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow, of the extra integrations")
def test_mlflow(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(_database(tmp_path))  # which makes the tables: four ranks would all try to
    on_four_ranks(_mlflow, tmp_path)
    experiment = client.get_experiment_by_name("pipelines")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert len(client.get_metric_history(run.info.run_id, "val_loss")) == 1
