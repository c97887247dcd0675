"""Callbacks of Lightning and hooks of users."""

from __future__ import annotations

import csv
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
from torch import Tensor

from tests.features.running import (
    Regression,
    assert_same,
    both,
    eval_loader,
    on_four_ranks,
    pipelines,
    refuse_each,
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


Found = dict[str, tuple[list[Any], Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank has, and what one process has."""
    runs = {"files": _files, "stopped": _stopped, "accumulated": _accumulate, "calls": _calls}
    return both(tmp_path_factory.mktemp("callbacks"), runs)


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
def test_model_checkpoint(found: Found) -> None:
    (first, *others), expected = found["files"]
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
def test_early_stopping(found: Found) -> None:
    ranks, expected = found["stopped"]
    assert 0 < expected[1] < 19
    assert set(ranks) == {expected}


class Summary(ModelSummary):
    total: int | None = None

    def summarize(self, summary_data: Any, total_parameters: int, *arguments: Any, **options: Any) -> None:  # type: ignore[override]
        self.total = total_parameters


def _watched(directory: Path, callbacks: list[L.Callback]) -> int | None:
    summary = Summary()
    trainer = pipelines(
        directory,
        logger=CSVLogger(directory),
        log_every_n_steps=1,
        enable_progress_bar=True,
        callbacks=[*callbacks, TQDMProgressBar(), summary],
        max_epochs=1,
    )
    trainer.fit(Regression(), train_loader(), eval_loader())
    return summary.total


@supported("Callbacks", "`LearningRateMonitor`")
@supported(
    "Callbacks",
    "`ThroughputMonitor`",
    "its device is rank 0's pipeline, and `mfu` a share of what all devices of that can do; its figures of all devices "
    "are those times the number of pipelines",
)
@supported("Callbacks", "`DeviceStatsMonitor`", "of rank 0's device")
@supported("Callbacks", "progress bar and `ModelSummary`", "shown by rank 0; the summary counts the whole model")
def test_what_watches_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    monitor = ThroughputMonitor(lambda batch: len(batch[0]), window_size=3)
    has_psutil = find_spec("psutil") is not None  # of the extra integrations
    stats = [DeviceStatsMonitor(cpu_stats=True)] if has_psutil else []
    totals = on_four_ranks(_watched, tmp_path, [LearningRateMonitor("step"), monitor, *stats])
    assert totals == [sum(p.numel() for p in Regression().parameters()), None, None, None]
    assert "Epoch 0: 100%" in capfd.readouterr().out
    with next(tmp_path.glob("**/metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    assert "lr-SGD" in rows[0]
    assert any("cpu_percent" in name for name in rows[0]) == has_psutil
    *_, last = (row for row in rows if row["train/device/samples_per_sec"])
    for what in ("samples_per_sec", "batches_per_sec"):
        assert float(last[f"train/{what}"]) == pytest.approx(2 * float(last[f"train/device/{what}"]))


def _accumulate(directory: Path) -> tuple[dict[str, Tensor], int]:
    callback = GradientAccumulationScheduler({0: 1, 1: 2})
    trainer, module = trainer_of_this_process(directory, callbacks=[callback]), Regression()
    trainer.fit(module, train_loader())
    return weights(module), trainer.global_step


@supported("Callbacks", "`GradientAccumulationScheduler`")
def test_accumulation_scheduler(found: Found) -> None:
    ranks, expected = found["accumulated"]
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
    trainer = trainer_of_this_process(directory, callbacks=[hooks], accumulate_grad_batches=2, num_sanity_val_steps=2)
    trainer.fit(Regression(), train_loader(), eval_loader())
    return hooks.calls


@supported("Callbacks", "`on_*` hooks are called as often as in one process, on every rank")
def test_hooks(found: Found) -> None:
    ranks, expected = found["calls"]
    assert expected["on_before_optimizer_step"] == 4
    assert expected["on_after_backward"] == 8
    assert all(calls == expected for calls in ranks)


_SECOND_COPY = "keeps a second copy of the whole model, and each worker holds its own stage only"
_REPLACES = "replaces parameters by others while training goes on, when the model has been cut"
_AFTER_FAILURE = "would save a checkpoint after a failure, when the stages that are gone cannot give their part"
_DISTRIBUTED = "The Batch size finder is not supported with distributed strategies"
_NO_LOSS = "stops where the loss grows, and the loss exists on last stages only"


_SAYS: list[tuple[L.Callback, str]] = [
    (StochasticWeightAveraging(1e-2), _SECOND_COPY),
    (WeightAveraging(), _SECOND_COPY),
    (ModelPruning("l1_unstructured", amount=0.5), _REPLACES),
    (OnExceptionCheckpoint("."), _AFTER_FAILURE),
    (ModelCheckpoint(save_on_exception=True), _AFTER_FAILURE),
    (BatchSizeFinder(), _DISTRIBUTED),
    (LearningRateFinder(), _NO_LOSS),
]


@refused("Callbacks", "`StochasticWeightAveraging`", _SECOND_COPY,
         "`SDPipeWeightAveraging(update_every_n_steps=0, update_starting_at_epoch=…)`, and `SWALR`; with "
         "`num_stages=1` it works")  # fmt: skip
@refused("Callbacks", "Lightning's `WeightAveraging`, `EMAWeightAveraging`", _SECOND_COPY,
         "`SDPipeWeightAveraging` takes the same arguments; with `num_stages=1` they work")  # fmt: skip
@refused("Callbacks", "`ModelPruning`", _REPLACES, "with `num_stages=1` it works")
@refused(
    "Callbacks",
    "`OnExceptionCheckpoint`, `ModelCheckpoint(save_on_exception=True)`",
    _AFTER_FAILURE,
    "with `num_stages=1` it works",
)
@refused("Callbacks", "`BatchSizeFinder`", _DISTRIBUTED, "Lightning's own rule for all distributed strategies")
@refused("Callbacks", "`LearningRateFinder`, `Tuner.lr_find`", _NO_LOSS, "with `num_stages=1` it works")
def test_what_does_not_go_with_parts_of_a_model(tmp_path: Path) -> None:
    refuse_each(tmp_path, [(Regression(), error, {"callbacks": [callback]}) for callback, error in _SAYS])
