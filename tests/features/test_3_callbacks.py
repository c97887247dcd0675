"""Callbacks of Lightning and hooks of users."""

from __future__ import annotations

import csv
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.errors import ConfigurationError
from tests.features.running import (
    Regression,
    assert_same,
    eval_loader,
    on_four_ranks,
    pipelines,
    train_loader,
    trainer_of_this_process,
    weights,
)
from tests.features.table import refused, supported

pytestmark = pytest.mark.distributed


SAVING: dict[str, dict[str, Any]] = {
    "best two": {"monitor": "val_loss", "save_top_k": 2, "save_last": True, "filename": "{epoch}"},
    "worst": {"monitor": "val_loss", "mode": "max", "save_top_k": 1, "filename": "{epoch}"},
    "by steps": {"every_n_train_steps": 5, "save_top_k": -1, "filename": "{step}"},
    "best by steps": {"every_n_train_steps": 5, "monitor": "loss_step", "save_top_k": 1, "filename": "{step}"},
}


def _files(directory: Path) -> dict[str, tuple[list[str], str, float]]:
    """Of each callback: the files, the best one, and its score."""
    callbacks = {name: ModelCheckpoint(directory / name, **options) for name, options in SAVING.items()}
    trainer = trainer_of_this_process(directory, callbacks=[*callbacks.values()], max_epochs=3)
    trainer.fit(Regression(), train_loader(), eval_loader())
    return {
        name: (
            sorted(path.name for path in (directory / name).iterdir()),
            Path(each.best_model_path).name,
            float(each.best_model_score or 0),
        )
        for name, each in callbacks.items()
    }


@supported("Callbacks", "`ModelCheckpoint`: `monitor`, `save_top_k`, `save_last`, `every_n_train_steps`")
def test_model_checkpoint(tmp_path: Path) -> None:
    first, *others = on_four_ranks(_files, tmp_path / "four")
    expected = _files(tmp_path / "one")
    assert all(rank == first for rank in others)
    for name, (files, best, score) in expected.items():
        if SAVING[name].get("monitor") != "loss_step":  # which is the loss of one pipeline
            assert first[name][:2] == (files, best)
            assert first[name][2] == pytest.approx(score, rel=1e-5)


def _stopped(directory: Path) -> tuple[int, int]:
    callback = EarlyStopping("val_loss", patience=1, min_delta=0.5)
    trainer = trainer_of_this_process(directory, callbacks=[callback], max_epochs=20)
    trainer.fit(Regression(), train_loader(), eval_loader())
    return trainer.current_epoch, callback.stopped_epoch


@supported("Callbacks", "`EarlyStopping`")
def test_early_stopping(tmp_path: Path) -> None:
    expected = _stopped(tmp_path / "one")
    assert 0 < expected[1] < 19
    assert set(on_four_ranks(_stopped, tmp_path / "four")) == {expected}


def _logged(directory: Path, callbacks: list[L.Callback]) -> str:
    options = {"logger": CSVLogger(directory), "log_every_n_steps": 1, "callbacks": callbacks, "max_epochs": 1}
    trainer = pipelines(directory, **options)
    trainer.fit(Regression(), train_loader(), eval_loader())
    return next(directory.glob("**/metrics.csv")).read_text().splitlines()[0] if trainer.is_global_zero else ""


@supported("Callbacks", "`LearningRateMonitor`")
def test_learning_rate_monitor(tmp_path: Path) -> None:
    assert "lr-SGD" in on_four_ranks(_logged, tmp_path, [LearningRateMonitor("step")])[0]


@supported(
    "Callbacks",
    "`ThroughputMonitor`",
    "its device is rank 0's pipeline, and `mfu` a share of what all devices of that can do; its figures of all devices "
    "are those times the number of pipelines",
)
def test_throughput_monitor(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(lambda batch: len(batch[0]), window_size=3)
    assert "train/device/samples_per_sec" in on_four_ranks(_logged, tmp_path, [monitor])[0]
    with next(tmp_path.glob("**/metrics.csv")).open() as file:
        *_, last = (row for row in csv.DictReader(file) if row["train/device/samples_per_sec"])
    for what in ("samples_per_sec", "batches_per_sec"):
        assert float(last[f"train/{what}"]) == pytest.approx(2 * float(last[f"train/device/{what}"]))


@supported("Callbacks", "`DeviceStatsMonitor`", "of rank 0's device")
@pytest.mark.skipif(find_spec("psutil") is None, reason="needs psutil, of the extra integrations")
def test_device_stats_monitor(tmp_path: Path) -> None:
    assert "cpu_percent" in on_four_ranks(_logged, tmp_path, [DeviceStatsMonitor(cpu_stats=True)])[0]


class Summary(ModelSummary):
    total: int | None = None

    def summarize(self, summary_data: Any, total_parameters: int, *arguments: Any, **options: Any) -> None:  # type: ignore[override]
        self.total = total_parameters


def _show(directory: Path) -> int | None:
    summary = Summary()
    options = {"enable_progress_bar": True, "callbacks": [TQDMProgressBar(), summary], "max_epochs": 1}
    pipelines(directory, **options).fit(Regression(), train_loader(), eval_loader())
    return summary.total


@supported("Callbacks", "progress bar and `ModelSummary`", "shown by rank 0; the summary counts the whole model")
def test_progress_bar_and_summary(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    totals = on_four_ranks(_show, tmp_path)
    assert totals == [sum(p.numel() for p in Regression().parameters()), None, None, None]
    assert "Epoch 0: 100%" in capfd.readouterr().out


def _accumulate(directory: Path) -> tuple[dict[str, Tensor], int]:
    callback = GradientAccumulationScheduler({0: 1, 1: 2})
    trainer, module = trainer_of_this_process(directory, callbacks=[callback]), Regression()
    trainer.fit(module, train_loader())
    return weights(module), trainer.global_step


@supported("Callbacks", "`GradientAccumulationScheduler`")
def test_accumulation_scheduler(tmp_path: Path) -> None:
    ranks, expected = on_four_ranks(_accumulate, tmp_path / "four"), _accumulate(tmp_path / "one")
    assert {steps for _, steps in ranks} == {expected[1]} == {6}
    assert_same([parts for parts, _ in ranks], expected[0])


_HOOKS = [name for name in dir(L.Callback) if name.startswith("on_")]


class Hooks(L.Callback):
    """Counts what is called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        for name in _HOOKS:
            setattr(self, name, self._count(name))

    def _count(self, name: str) -> Any:
        def count(*_: Any, **__: Any) -> None:
            self.calls[name] += 1

        return count


def _calls(directory: Path) -> Counter[str]:
    hooks = Hooks()
    trainer = trainer_of_this_process(directory, callbacks=[hooks], accumulate_grad_batches=2)
    trainer.fit(Regression(), train_loader(), eval_loader())
    return hooks.calls


@supported("Callbacks", "`on_*` hooks are called as often as in one process, on every rank")
def test_hooks(tmp_path: Path) -> None:
    expected = _calls(tmp_path / "one")
    assert expected["on_before_optimizer_step"] == 4
    assert expected["on_after_backward"] == 8
    assert all(calls == expected for calls in on_four_ranks(_calls, tmp_path / "four"))


def _refuse(directory: Path, callback: L.Callback, error: str, strategy: SDPipeStrategy | None = None) -> None:
    trainer = pipelines(directory, strategy, callbacks=[callback])
    with pytest.raises((ConfigurationError, MisconfigurationException), match=re.escape(error)):
        trainer.fit(Regression(), train_loader())


_SECOND_COPY = "keeps a second copy of the whole model, and each worker holds its own stage only"


@refused("Callbacks", "`StochasticWeightAveraging`", _SECOND_COPY,
         "`SDPipeWeightAveraging(update_every_n_steps=0, update_starting_at_epoch=…)`, and `SWALR`; with "
         "`num_stages=1` it works")  # fmt: skip
def test_stochastic_weight_averaging(tmp_path: Path) -> None:
    on_four_ranks(_refuse, tmp_path, StochasticWeightAveraging(1e-2), _SECOND_COPY)


@refused("Callbacks", "Lightning's `WeightAveraging`, `EMAWeightAveraging`", _SECOND_COPY,
         "`SDPipeWeightAveraging` takes the same arguments; with `num_stages=1` they work")  # fmt: skip
def test_weight_averaging(tmp_path: Path) -> None:
    on_four_ranks(_refuse, tmp_path, WeightAveraging(), _SECOND_COPY)


_REPLACES = "replaces parameters by others while training goes on, when the model has been cut"


@refused("Callbacks", "`ModelPruning`", _REPLACES, "with `num_stages=1` it works")
def test_pruning(tmp_path: Path) -> None:
    on_four_ranks(_refuse, tmp_path, ModelPruning("l1_unstructured", amount=0.5), _REPLACES, count=2)


_AFTER_FAILURE = "would save a checkpoint after a failure, when the stages that are gone cannot give their part"


@refused(
    "Callbacks",
    "`OnExceptionCheckpoint`, `ModelCheckpoint(save_on_exception=True)`",
    _AFTER_FAILURE,
    "with `num_stages=1` it works",
)
@pytest.mark.parametrize("callback", [OnExceptionCheckpoint("."), ModelCheckpoint(save_on_exception=True)])
def test_checkpoint_on_exception(tmp_path: Path, callback: L.Callback) -> None:
    on_four_ranks(_refuse, tmp_path, callback, _AFTER_FAILURE)


_DISTRIBUTED = "The Batch size finder is not supported with distributed strategies"


@refused("Callbacks", "`BatchSizeFinder`", _DISTRIBUTED, "Lightning's own rule for all distributed strategies")
def test_batch_size_finder(tmp_path: Path) -> None:
    on_four_ranks(_refuse, tmp_path, BatchSizeFinder(), _DISTRIBUTED)


_NO_LOSS = "stops where the loss grows, and the loss exists on last stages only"


@refused("Callbacks", "`LearningRateFinder`, `Tuner.lr_find`", _NO_LOSS, "with `num_stages=1` it works")
def test_learning_rate_finder(tmp_path: Path) -> None:
    on_four_ranks(_refuse, tmp_path, LearningRateFinder(), _NO_LOSS)
