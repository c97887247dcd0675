"""What is logged, and where it arrives."""

from __future__ import annotations

import csv
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanAbsoluteError, MeanMetric, MetricCollection, R2Score

from lightning_sdpipe import AllReduce, LocalSGD, SDPipeStrategy
from lightning_sdpipe.p2p import labelled
from tests.features.running import (
    BATCH,
    Regression,
    both,
    eval_loader,
    on_four_ranks,
    on_pipelines,
    pipelines,
    refuse,
    samples,
    train_loader,
    trainer_of_this_process,
)
from tests.features.table import refused, supported

pytestmark = pytest.mark.distributed


class Logging(Regression):
    """Logs in all the ways there are."""

    def __init__(self) -> None:
        super().__init__()
        self.train_error = MeanAbsoluteError()
        self.val_metrics = MetricCollection({"r2": R2Score(), "mae": MeanAbsoluteError()})
        self.computed = MeanAbsoluteError()
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        loss = torch.nn.functional.mse_loss(outputs, batch[1])
        self.log("epoch_only", loss, on_step=False, on_epoch=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("largest", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max", batch_size=len(batch[0]))
        self.log_dict({"a": loss * 2, "b": float(batch_idx)}, on_step=False, on_epoch=True)
        self.train_error(outputs, batch[1])
        self.log("train_error", self.train_error, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        outputs = self.net(batch[0])
        self.val_metrics.update(outputs, batch[1])
        self.log_dict(self.val_metrics)
        self.computed.update(outputs, batch[1])
        loss = torch.nn.functional.mse_loss(outputs, batch[1])
        self.losses.append(loss)
        self.log("val_loss", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("computed", self.computed.compute())
        self.computed.reset()
        self.log("stacked", torch.stack(self.losses).mean(), sync_dist=True)
        self.losses.clear()

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))


Found = tuple[dict[str, float], dict[str, float]]
"""The metrics that callbacks see, and those of the progress bar."""


def _fit(directory: Path) -> Found:
    loggers = [CSVLogger(directory), TensorBoardLogger(directory)]
    trainer = trainer_of_this_process(directory, logger=loggers, log_every_n_steps=1)
    trainer.fit(Logging(), train_loader(), eval_loader())
    return (
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        {name: float(value) for name, value in trainer.progress_bar_metrics.items()},
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[list[Any], Any]]]:
    """A directory, what each of four ranks has, and what one process has."""
    directory = tmp_path_factory.mktemp("logged")
    return directory, both(directory, {"logged": _fit, "steps": _steps, "profiled": _profiled})


@pytest.fixture
def fitted(runs: tuple[Path, dict[str, Any]]) -> tuple[Path, list[Found], Found]:
    directory, found = runs
    return directory / "four" / "logged", *found["logged"]


@supported("Logging", "`self.log`, `self.log_dict` with `on_step`, `on_epoch`, `prog_bar`, `reduce_fx`, `batch_size`",
           "values of an epoch are those of one process, to 1e-5; those of a step are rank 0's pipeline's, its "
           "micro-batches averaged")  # fmt: skip
def test_logged_values(fitted: tuple[Path, list[Found], Found]) -> None:
    _, ranks, (expected, shown) = fitted
    # the largest loss is of a micro-batch's mean, which another split of the samples changes
    compared = [name for name in expected if not name.endswith("_step") and name not in ("both", "largest")]
    for metrics, _ in ranks:  # every rank knows them
        assert set(metrics) == set(expected)
        assert {n: metrics[n] for n in compared} == pytest.approx({n: expected[n] for n in compared}, rel=1e-5)
    assert set(ranks[0][1]) == set(shown)
    assert ranks[0][1]["both_epoch"] == pytest.approx(shown["both_epoch"], rel=1e-5)


class Counting(Regression):
    """Logs how often it is asked, and a value of each micro-batch that is known beforehand."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.log("mean", batch[0].mean(), on_step=True)
        self.log("sum", float(len(batch[0])), on_step=True, reduce_fx="sum")
        return self.loss(batch)


def _steps(directory: Path) -> tuple[float, float, Tensor]:
    trainer = trainer_of_this_process(directory, max_steps=1)
    seen: list[Tensor] = []
    module = Counting()
    module.on_train_batch_end = lambda outputs, batch, batch_idx: seen.append(batch[0])  # type: ignore[method-assign]
    trainer.fit(module, train_loader())
    return float(trainer.callback_metrics["mean"]), float(trainer.callback_metrics["sum"]), seen[0]


@supported("Logging", "micro-batches of one step are averaged (or summed, as `reduce_fx` says), not overwritten")
def test_micro_batches(runs: tuple[Path, dict[str, Any]]) -> None:
    ((mean, total, batch), *_), _ = runs[1]["steps"]
    assert mean == pytest.approx(float(batch.mean()), rel=1e-6)
    assert total == len(batch) == 4


class ByClass(Regression):
    """Logs what its batch has: a pipeline has other classes than the other, or comes to them in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.of_two = MeanMetric()

    def log_classes(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        classes = y[:, 0].round().long()
        for one in classes.unique().tolist():
            of_it = x[classes == one]
            for name, reduced in (("mean", of_it.mean()), ("max", of_it.max()), ("min", of_it.min())):
                self.log(f"{name}_{one}", reduced, on_step=True, on_epoch=True, reduce_fx=name, batch_size=len(of_it))
            self.log(f"sum_{one}", float(len(of_it)), on_step=False, on_epoch=True, reduce_fx="sum")
            if one == 2:
                self.of_two.update(of_it.mean(1))
                self.log("of_two", self.of_two, on_step=False, on_epoch=True)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.log_classes(batch)
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log_classes(batch)


def _by_class(directory: Path) -> list[dict[str, float]]:
    cut: Any = SDPipeStrategy(1, AllReduce(), data="sharded") if on_pipelines() else "auto"
    trainer = trainer_of_this_process(directory, strategy=cut)
    size, data = BATCH if on_pipelines() else 2 * BATCH, samples(27)
    trainer.fit(ByClass(), DataLoader(data, size, sampler=_Turns(data)))
    trained = {name: float(value) for name, value in trainer.callback_metrics.items() if "_step" not in name}
    trainer.validate(ByClass(), [DataLoader(samples(28), size), DataLoader(samples(14), size)], verbose=False)
    return [trained, {name: float(value) for name, value in trainer.callback_metrics.items()}]


class _Turns(DistributedSampler[Any]):
    """Every other sample for each of two pipelines; all for one process."""

    def __init__(self, data: Any) -> None:
        world = int(os.environ.get("WORLD_SIZE", 1))
        super().__init__(data, world, int(os.environ.get("RANK", 0)), shuffle=False, drop_last=False)

    def __iter__(self) -> Any:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]


def test_values_that_some_pipelines_log_are_reduced_over_those(tmp_path: Path) -> None:
    ranks, expected = on_four_ranks(_by_class, tmp_path, count=2), _by_class(tmp_path)
    for rank in ranks:
        assert rank == [pytest.approx(values, rel=1e-5) for values in expected]


@supported("Logging", "torchmetrics objects, logged or computed at the end of an epoch, and `MetricCollection`",
           "gathered from all pipelines")  # fmt: skip
def test_metrics(fitted: tuple[Path, list[Found], Found]) -> None:
    _, [(metrics, _), *_], (expected, _) = fitted
    for name in ("train_error", "r2", "mae", "computed"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5)


@supported("Logging", "`on_validation_epoch_end` that works on collected outputs",
           "this hook, those of test and predict, and `on_*_batch_end` of evaluation run on last stages only, where "
           "the outputs are; `on_train_epoch_end` runs on every stage")  # fmt: skip
def test_collected_outputs(fitted: tuple[Path, list[Found], Found]) -> None:
    _, [(metrics, _), *_], (expected, _) = fitted
    assert metrics["stacked"] == pytest.approx(expected["stacked"], rel=1e-5)


@supported("Logging", "CSV and TensorBoard loggers", "written by rank 0")
def test_loggers(fitted: tuple[Path, list[Found], Found]) -> None:
    directory, *_ = fitted
    (table,) = directory.glob("**/metrics.csv")
    rows = list(csv.DictReader(table.open()))
    assert [row["step"] for row in rows if row["both_step"]] == [str(step) for step in range(8)]
    assert len([row for row in rows if row["val_loss"]]) == 2
    (events,) = directory.glob("**/events.out.tfevents.*")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("both_step")] == list(range(8))


def _profiled(directory: Path) -> set[str]:
    if not on_pipelines():
        return set()
    profiler = PyTorchProfiler(directory, "profile", record_module_names=False)
    strategy = SDPipeStrategy(2, LocalSGD(every=1), data="sharded")
    trainer = pipelines(directory, strategy, max_epochs=1, profiler=profiler)
    trainer.fit(Regression(), train_loader())
    assert profiler.function_events is not None
    return {event.key for event in profiler.function_events.key_averages() if event.key.startswith("sdpipe:")}


_HOOKS = "times every module by hooks before and after it, and blocks of other stages do not run"


@refused("Logging", "`PyTorchProfiler(record_module_names=True)`, its default", _HOOKS)
def test_profiler_of_modules(tmp_path: Path) -> None:
    on_four_ranks(partial(refuse, profiler="pytorch"), tmp_path, Regression(), _HOOKS, count=2)


@supported("Logging", "`PyTorchProfiler(record_module_names=False)`, and `torch.profiler`",
           "labels `sdpipe:forward 3` and so on, by micro-batch, and `wait`, `group`, `exchange`")  # fmt: skip
def test_profiler(runs: tuple[Path, dict[str, Any]]) -> None:
    each = {"sdpipe:forward 0", "sdpipe:forward 1", "sdpipe:backward 0", "sdpipe:backward 1", "sdpipe:wait"}
    for labels in runs[1]["profiled"][0]:
        assert labels == each | {"sdpipe:group", "sdpipe:exchange"}
    assert labelled("forward", 3) is labelled("wait")  # nothing is made without a profiler
