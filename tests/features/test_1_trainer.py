"""What the Trainer runs, and for how long."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader

from tests.features.running import Regression, both, eval_loader, samples, trainer_of_this_process
from tests.features.table import supported

pytestmark = pytest.mark.distributed


def _evaluate(directory: Path) -> list[Any]:
    trainer, module = trainer_of_this_process(directory), Regression()
    return [*trainer.validate(module, eval_loader()), *trainer.test(module, eval_loader())]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Any], Any]]:
    """What each rank has, and what one process has."""
    predict = {f"predicted {count}": functools.partial(_predict, count=count) for count in (22, 4)}
    return both(tmp_path_factory.mktemp("run"), {"evaluated": _evaluate, "written": _write, **predict})


@supported("Trainer", "`validate`, `test`", "returns the metrics on rank 0")
def test_evaluation(found: dict[str, Any]) -> None:
    (first, *_), alone = found["evaluated"]
    for metrics, expected in zip(first, alone, strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5)


class Structured(Regression):
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        outputs = super().predict_step(batch, batch_idx)
        return {"outputs": outputs, "sizes": [len(outputs)]}


def _predict(directory: Path, count: int) -> Any:
    return trainer_of_this_process(directory).predict(Structured(), DataLoader(samples(count), 4))


@supported("Trainer", "`predict`", "on rank 0, all batches in the order of the data")
@pytest.mark.parametrize("count", [22, 4])
def test_predict(found: dict[str, Any], count: int) -> None:
    (predictions, *_), expected = found[f"predicted {count}"]
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
    trainer = trainer_of_this_process(directory, callbacks=[writer])
    trainer.predict(Regression(), DataLoader(samples(22), 4), return_predictions=False)
    return writer.written, writer.epoch


@supported("Trainer", "`BasePredictionWriter`", "each pipeline's last stage writes its share, with the right indices")
def test_prediction_writer(found: dict[str, Any]) -> None:
    ranks, (expected, _) = found["written"]
    written = {index: value for parts, _ in ranks for index, value in parts.items()}
    assert sum(len(parts) for parts, _ in ranks) == 22
    assert sorted(index for _, indices in ranks for index in indices) == list(range(22))
    torch.testing.assert_close(written, expected)
