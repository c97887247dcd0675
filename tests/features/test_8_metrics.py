"""Metrics on stages that do not come to the end of a step, where they are updated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MaxMetric, MeanAbsoluteError, MeanMetric, MeanSquaredError, MetricCollection

from tests.features.running import (
    Regression,
    assert_same,
    compare,
    fitted,
    on_four_ranks,
    refuse_each,
    samples,
    trainer_of_this_process,
    weights,
)

pytestmark = pytest.mark.distributed


class Scaled(Regression):
    def __init__(self, late: bool) -> None:
        super().__init__()
        self.seen, self.late = MeanMetric(), late

    def scale(self, batch_idx: int) -> Tensor:
        known = batch_idx > 0 if self.late else self.seen.update_called  # what is rehearsed is the first batch
        return self.seen.compute() if known else torch.ones(())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x * self.scale(batch_idx)), y)
        self.seen.update(loss.detach())
        return loss


def test_it_is_refused(tmp_path: Path) -> None:
    early = "training_step keeps a value from one batch to the next"
    late = "The metric 'seen' is computed in a step on a stage that has never updated it"
    refuse_each(tmp_path, [(Scaled(False), early, {}), (Scaled(True), late, {})])


class Deciding(Regression):
    """Changes what all stages compute with by metrics that it computes where an epoch ends, on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()
        self.errors = MetricCollection({"mean": MeanAbsoluteError(), "largest": MaxMetric(), "all": CatMetric()})
        self.evaluated, self.plain = MeanMetric(), {"losses": [MeanMetric()]}
        self.history: list[Any] = []
        self.scale = 1.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        output = self.net(x * self.scale)
        self.error.update(output.detach(), y)
        self.plain["losses"][0].update(output.detach())
        for name, metric in self.errors.items(copy_state=False):
            metric.update(*((output.detach(), y) if name == "mean" else ((output - y).detach().abs(),)))
        return nn.functional.mse_loss(output, y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        loss = self.loss(batch)
        self.evaluated.update(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        error, errors = float(self.error.compute()), self.errors.compute()
        numbers = errors["mean"], errors["largest"], errors["all"].mean(), self.plain["losses"][0].compute()
        self.history.append((error, *map(float, numbers)))
        self.scale *= 1 + error / 10
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 1 - error / 10
        self.error.reset()
        self.errors.reset()

    def on_validation_epoch_end(self) -> None:
        self.evaluated.reset()


class Seeing(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []
        self.own = MeanMetric()

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.own.update(outputs)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen += [float(pl_module.evaluated.compute()), float(self.own.compute())]
        self.own.reset()


def _decide(directory: Path) -> tuple[dict[str, Tensor], list[Any], list[float]]:
    model, seeing = Deciding(), Seeing()
    options: dict[str, Any] = {"callbacks": [seeing], "use_distributed_sampler": False, "max_epochs": 3}
    trainer_of_this_process(directory, **options).fit(model, DataLoader(samples(), 8), DataLoader(samples(), 8))
    return weights(model), model.history, seeing.seen


def test_all_stages_compute_the_same_where_an_epoch_ends(tmp_path: Path) -> None:
    ranks, (whole, history, seen) = on_four_ranks(_decide, tmp_path, count=2), _decide(tmp_path)
    assert_same([parts for parts, _, _ in ranks], whole)
    assert len(history) == 3
    for _, computed, evaluated in ranks:
        torch.testing.assert_close(torch.tensor(computed), torch.tensor(history), rtol=1e-5, atol=1e-6)
        assert evaluated == pytest.approx(seen, rel=1e-5)


class Late(Regression):
    """Makes its metric in a step; where an evaluation ends, only last stages compute it and let it go."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.error = getattr(self, "error", None) or MeanMetric()
        self.error.update(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", float(self.error.compute()))
        del self.error


def test_metrics_may_be_made_at_any_time(tmp_path: Path) -> None:
    compare(tmp_path, {"late": lambda path: fitted(path, Late())})
