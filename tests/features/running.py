"""Run trainings as two pipelines of two stages, in real processes, and compare them with one process."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities import registry
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_sdpipe import AllReduce, SDPipeStrategy
from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.topology.groups import keep_until_the_end
from recipes.harness import processes
from recipes.harness.processes import be_rank
from tests.workers import free_port, run_workers

BATCH = 4  # of one pipeline
SAMPLES = 32
registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[assignment]  # for every Trainer


def train_before_forks(directory: Path) -> None:
    """Train once in this process, so that its forks need not repeat what a first training costs: imports, caches of
    Lightning, and the search for callbacks in all packages are half of the processor time of a short one. A first
    training under the strategy costs another tenth."""
    with isolate_rng(), mock.patch.dict(os.environ), mock.patch.object(sys, "excepthook", sys.excepthook):
        one_process(directory, enable_checkpointing=True).fit(Regression(), train_loader(), eval_loader())
        as_torchrun(0, free_port(), 1, functools.partial(fitted, strategy=SDPipeStrategy(), max_epochs=1), (directory,))
        dist.destroy_process_group()
        keep_until_the_end(())


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
    """Return a Trainer on CPUs that prints nothing, saves nothing unless a callback does, and validates after training
    only: sanity validation would be a fifth of what a short fit costs."""
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet["num_sanity_val_steps"] = 0
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
    """Assert that each of the runs leaves on four ranks what it leaves in one process."""
    for name, (ranks, (expected, metrics, equal)) in both(directory, runs).items():
        assert_same([rank[0] for rank in ranks], expected, name)
        assert not torch.equal(expected["net.0.weight"], Regression().net[0].weight), name
        assert ranks[0][1] == pytest.approx(metrics, rel=1e-5), name
        assert all(rank[2] == equal for rank in ranks), name


def both(
    directory: Path, runs: Mapping[str, Callable[[Path], Any]], count: int = 4
) -> dict[str, tuple[list[Any], Any]]:
    """Return what each run returns on each rank, and in one process. All runs share the ranks."""

    def run(path: Path) -> dict[str, Any]:
        return {name: run(path / name) for name, run in runs.items()}

    ranks, alone = on_four_ranks(run, directory / "four", count=count), run(directory / "one")
    return {name: ([rank[name] for rank in ranks], alone[name]) for name in runs}


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


def refuse_each(directory: Path, cases: Sequence[tuple[Any, str, dict[str, Any]]], **options: Any) -> None:
    """Assert that training of each module ends with these words on both ranks, at the same point."""

    def each(directory: Path) -> None:
        for module, error, own in cases:
            try:
                refuse(directory, module, error, **options, **own)
            except BaseException as failure:
                failure.add_note(f"{type(module).__name__}: {error}")
                raise

    on_four_ranks(each, directory, count=2)


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


def eval_loader(count: int = SAMPLES // 2) -> DataLoader[Any]:
    return DataLoader(samples(count), BATCH if on_pipelines() else 2 * BATCH)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights that this rank holds."""
    return {name: value.clone() for name, value in module.state_dict().items() if not value.is_meta}


def assert_same(parts: list[dict[str, Tensor]], whole: dict[str, Tensor], of: str = "", **tolerance: float) -> None:
    """Assert that the parts of all ranks make up ``whole``; ``of`` names the run in the message."""
    assert set().union(*parts) == set(whole), of
    near = {"rtol": 1e-5, "atol": 1e-6, **tolerance}
    for part in parts:
        for name, value in part.items():
            torch.testing.assert_close(value, whole[name], **near, msg=lambda m, n=name: f"{of} {n}: {m}")
