"""Run trainings as two pipelines of two stages, in real processes, and compare them with one process."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.fabric.utilities import registry
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_sdpipe import AllReduce, SDPipeStrategy
from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from recipes.harness import processes
from recipes.harness.processes import be_rank
from tests.workers import free_port, run_workers

BATCH = 4  # of one pipeline
SAMPLES = 32
registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[assignment]  # for every Trainer


def train_before_forks(directory: Path) -> None:
    """Train once in this process, so that its forks need not repeat what a first training costs: imports, caches of
    Lightning, and the search for callbacks in all packages are half of the processor time of a short one."""
    with torch.random.fork_rng():
        one_process(directory, enable_checkpointing=True).fit(Regression(), train_loader(), eval_loader())


def on_four_ranks(work: Callable[..., Any], *arguments: Any, count: int = 4) -> list[Any]:
    """Return what ``work(*arguments)`` returns on each rank."""
    return run_workers(count, as_torchrun, free_port(), count, work, arguments)


def as_torchrun(rank: int, port: int, count: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call ``work`` in the environment that torchrun gives one rank of ``count``."""
    be_rank(rank, count, port)
    with mock.patch.object(SDPipeStrategy, "on_exception", _let_go):
        return work(*arguments)


def _let_go(strategy: SDPipeStrategy, exception: BaseException, heard: Any = SDPipeStrategy.on_exception) -> None:
    """Close the connections at the end of this rank, so that others learn of an error, which the work may expect."""
    processes.holds = False
    heard(strategy, exception)


def pipelines(directory: Path, strategy: SDPipeStrategy | None = None, **options: Any) -> L.Trainer:
    """Return a Trainer for four ranks."""
    strategy = strategy or SDPipeStrategy(num_stages=2, sync=AllReduce())
    return quiet_trainer(
        default_root_dir=directory, strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), **options
    )


def one_process(directory: Path, **options: Any) -> L.Trainer:
    """Return a Trainer for one process, with which the pipelines are compared."""
    return quiet_trainer(default_root_dir=directory, devices=1, **options)


def trainer_of_this_process(directory: Path, **options: Any) -> L.Trainer:
    """Return a Trainer for four ranks or for one process, in a function that runs in both ways to be compared."""
    return pipelines(directory, **options) if on_pipelines() else one_process(directory, **options)


def quiet_trainer(**options: Any) -> L.Trainer:
    """Return a Trainer on CPUs that prints nothing, and saves nothing unless a callback does."""
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = options.get("callbacks") or []
    saves = any(isinstance(callback, Checkpoint) for callback in (given if isinstance(given, list) else [given]))
    return L.Trainer(**{"accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": saves, **quiet, **options})


class Regression(L.LightningModule):
    """A chain of four blocks with plain SGD, for which averaging gradients and averaging models is the same."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


Outcome = tuple[dict[str, Tensor], dict[str, float], list[Any]]
"""Weights that a rank holds, metrics of whole epochs, and what must be equal on all ranks."""


def fitted(directory: Path, module: Regression | None = None, loaders: Any = None, **options: Any) -> Outcome:
    """Train a module on four ranks or in one process, and return the Trainer."""
    trainer, module = trainer_of_this_process(directory, **options), module or Regression()
    trainer.fit(module, *(loaders or (train_loader(), eval_loader())))
    compared = [name for name in trainer.callback_metrics if name in ("loss_epoch", "val_loss", "both")]
    metrics = {name: float(trainer.callback_metrics[name]) for name in compared}
    return weights(module), metrics, [trainer.global_step, trainer.current_epoch]


def compare(directory: Path, runs: Mapping[str, Callable[[Path], Outcome]]) -> None:
    """Assert that each of the runs leaves on four ranks what it leaves in one process. All runs share the four
    processes."""

    def run(path: Path) -> dict[str, Outcome]:
        return {name: run(path / name) for name, run in runs.items()}

    ranks, alone = on_four_ranks(run, directory / "four"), run(directory / "one")
    for name, (expected, metrics, equal) in alone.items():
        assert_same([rank[name][0] for rank in ranks], expected)
        assert not torch.equal(expected["net.0.weight"], Regression().net[0].weight), name
        assert ranks[0][name][1] == pytest.approx(metrics, rel=1e-5), name
        assert all(rank[name][2] == equal for rank in ranks), name


def refuse(
    directory: Path,
    module: L.LightningModule,
    error: str,
    strategy: SDPipeStrategy | None = None,
    loaders: Any = None,
    **options: Any,
) -> None:
    """Assert that training on four ranks ends with these words."""
    with pytest.raises((ConfigurationError, MisconfigurationException, WorkerFailedError), match=re.escape(error)):
        pipelines(directory, strategy, **options).fit(module, *(loaders or (train_loader(), eval_loader())))


def samples(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def on_pipelines() -> bool:
    return "WORLD_SIZE" in os.environ


def train_loader(count: int = SAMPLES, **options: Any) -> DataLoader[Any]:
    """Two batches of 4 on two pipelines hold what one batch of 8 holds in one process: Lightning's distributed sampler
    shuffles the samples and deals them out in turn."""
    data = samples(count)
    if on_pipelines():
        return DataLoader(data, BATCH, **options)
    return DataLoader(data, 2 * BATCH, sampler=DistributedSampler(data, num_replicas=1, rank=0), **options)


def eval_loader(count: int = SAMPLES) -> DataLoader[Any]:
    return DataLoader(samples(count), BATCH if on_pipelines() else 2 * BATCH)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights that this rank holds."""
    return {name: value.clone() for name, value in module.state_dict().items() if not value.is_meta}


def assert_same(parts: list[dict[str, Tensor]], whole: dict[str, Tensor], **tolerance: float) -> None:
    """Assert that the parts of all ranks make up ``whole``."""
    assert set().union(*parts) == set(whole)
    for part in parts:
        for name, value in part.items():
            torch.testing.assert_close(value, whole[name], **{"rtol": 1e-5, "atol": 1e-6, **tolerance})
