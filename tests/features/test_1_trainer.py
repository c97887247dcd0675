"""What the Trainer runs, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.features.running import (
    Regression,
    assert_same,
    eval_loader,
    on_four_ranks,
    one_process,
    pipelines,
    samples,
    train_loader,
    trainer_of_this_process,
    weights,
)
from tests.features.table import supported

pytestmark = pytest.mark.distributed


def _fit(
    directory: Path, options: dict[str, Any], make: type[Regression] = Regression
) -> tuple[dict[str, Tensor], dict[str, float], int]:
    trainer, module = trainer_of_this_process(directory, **options), make()
    trainer.fit(module, train_loader(), eval_loader())
    return weights(module), {k: float(v) for k, v in trainer.callback_metrics.items()}, trainer.global_step


def _compare(directory: Path, make: type[Regression] = Regression, **options: Any) -> int:
    """Trains on four ranks and in one process; returns the number of steps."""
    ranks = on_four_ranks(_fit, directory / "four", options, make)
    expected, expected_metrics, expected_steps = _fit(directory / "one", options)
    assert_same([parts for parts, _, _ in ranks], expected)
    for _, metrics, steps in ranks:
        assert steps == expected_steps
        compared = {"loss_epoch", "val_loss"} & set(expected_metrics)
        assert {k: metrics[k] for k in compared} == pytest.approx({k: expected_metrics[k] for k in compared}, rel=1e-5)
    return expected_steps


@supported("Trainer", "`fit`, with sanity validation", "the result of one process on the joined batch, to 1e-5")
def test_fit(tmp_path: Path) -> None:
    assert _compare(tmp_path, num_sanity_val_steps=2) == 8


class BuiltInSetup(Regression):
    """The same, of lazy modules."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def setup(self, stage: str) -> None:
        self.net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(8), nn.LazyLinear(1))
        self.net(torch.zeros(1, 6))
        self.net.load_state_dict(Regression().net.state_dict())


@supported("Trainer", "a module that is built in `setup` or `configure_model`",
           "lazy modules must have run by then; `\"popen\"` alone leaves it in your process, too")  # fmt: skip
def test_a_module_that_setup_builds(tmp_path: Path) -> None:
    assert _compare(tmp_path, BuiltInSetup, max_steps=2) == 2


@supported("Trainer", "`limit_train_batches`, `limit_val_batches`, …")
def test_limits(tmp_path: Path) -> None:
    assert _compare(tmp_path, limit_train_batches=0.5, limit_val_batches=0.5) == 4


@supported("Trainer", "`fast_dev_run`")
def test_fast_dev_run(tmp_path: Path) -> None:
    assert _compare(tmp_path, fast_dev_run=2) == 2


@supported("Trainer", "`overfit_batches`")
def test_overfit(tmp_path: Path) -> None:
    assert _compare(tmp_path, overfit_batches=1, max_epochs=3) == 3


@supported("Trainer", "`max_steps`")
def test_max_steps(tmp_path: Path) -> None:
    assert _compare(tmp_path, max_steps=3, max_epochs=-1) == 3


@supported("Trainer", "`val_check_interval`, `check_val_every_n_epoch`")
@pytest.mark.parametrize("options", [{"val_check_interval": 0.25}, {"check_val_every_n_epoch": 2}])
def test_validation_intervals(tmp_path: Path, options: dict[str, Any]) -> None:
    assert _compare(tmp_path, **options) == 8


def _evaluate(directory: Path) -> list[Any]:
    trainer, module = trainer_of_this_process(directory), Regression()
    return [*trainer.validate(module, eval_loader()), *trainer.test(module, eval_loader())]


@supported("Trainer", "`validate`, `test`", "returns the metrics on rank 0")
def test_evaluation(tmp_path: Path) -> None:
    for metrics, expected in zip(on_four_ranks(_evaluate, tmp_path)[0], _evaluate(tmp_path), strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5)


class Structured(Regression):
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        outputs = super().predict_step(batch, batch_idx)
        return {"outputs": outputs, "sizes": [len(outputs)]}


def _predict(directory: Path, count: int) -> Any:
    return trainer_of_this_process(directory).predict(Structured(), DataLoader(samples(count), 4))


@supported("Trainer", "`predict`", "on rank 0, all batches in the order of the data")
@pytest.mark.parametrize("count", [22, 4])
def test_predict(tmp_path: Path, count: int) -> None:
    predictions, expected = on_four_ranks(_predict, tmp_path, count)[0], _predict(tmp_path, count)
    for mine, theirs in zip(predictions, expected, strict=True):
        assert mine["sizes"] == theirs["sizes"]
        torch.testing.assert_close(mine["outputs"], theirs["outputs"])


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: dict[int, Tensor] = {}
        self.epoch: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *arguments: Any
    ) -> None:
        self.written |= dict(zip(batch_indices, prediction, strict=True))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epoch = [i for batch in batch_indices[0] for i in batch]


def _write(directory: Path) -> tuple[dict[int, Tensor], list[int]]:
    writer = Writer()
    pipelines(directory, callbacks=[writer]).predict(Regression(), DataLoader(samples(22), 4), return_predictions=False)
    return writer.written, writer.epoch


@supported("Trainer", "`BasePredictionWriter`", "each pipeline's last stage writes its share, with the right indices")
def test_prediction_writer(tmp_path: Path) -> None:
    ranks = on_four_ranks(_write, tmp_path)
    written = {index: value for parts, _ in ranks for index, value in parts.items()}
    assert sum(len(parts) for parts, _ in ranks) == 22
    assert sorted(index for _, indices in ranks for index in indices) == list(range(22))
    expected = one_process(tmp_path).predict(Regression(), DataLoader(samples(22), 4))
    assert expected is not None
    torch.testing.assert_close(torch.stack([written[i] for i in range(22)]), torch.cat(expected))
