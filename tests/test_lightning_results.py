"""Results that several pipelines have logged of parts of the data, merged as if one process had logged all of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, PearsonCorrCoef
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassPrecision

from lightning_sdpipe.lightning_results import (
    merge_results,
    metric_counts,
    pack_results,
    updated_metrics,
    why_not_merged,
)
from tests.features.running import quiet_trainer

BATCHES, SIZE = 7, 5


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    size = SIZE - (number == BATCHES - 1)  # the last batch is smaller
    return torch.rand(size, 3, generator=generator), torch.randint(3, (size,), generator=generator)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)
        self.auroc = BinaryAUROC()  # keeps all predictions
        self.both = MetricCollection([MulticlassPrecision(3), MulticlassAccuracy(3)])  # one group of states
        self.of_training = MeanMetric()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        scores, labels = batch
        loss = torch.nn.functional.cross_entropy(scores, labels)
        self.log("mean", loss)
        for reduction in ("sum", "max", "min"):
            self.log(reduction, loss, reduce_fx=reduction)
        if batch_idx == 3:
            self.log("only_once", loss.double())
        self.accuracy(scores, labels)
        self.log("accuracy", self.accuracy)
        self.auroc.update(scores[:, 0], labels == 0)
        self.auroc.compute()  # which the metric remembers
        self.log("auroc", self.auroc)
        self.both.update(scores, labels)
        self.log_dict(self.both)


class Part(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Batches of those numbers."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return batch(self.numbers[index])


def evaluated(numbers: Sequence[int], at_end: Callable[[L.Trainer, L.LightningModule], None]) -> dict[str, float]:
    """The metrics of a process that evaluates those batches, and does something before they are computed."""

    class Evaluated(Model):
        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            super().validation_step(batch, numbers[batch_idx])
            if batch_idx == len(numbers) - 1:
                at_end(self.trainer, self)

    trainer = quiet_trainer()
    model = Evaluated()
    model.of_training.update(7.0)
    (metrics,) = trainer.validate(model, torch.utils.data.DataLoader(Part(numbers), batch_size=None), verbose=False)
    return dict(metrics)


def no_rule(_: Metric) -> bool:
    return False


def packed(numbers: Sequence[int]) -> bytes:
    found: list[bytes] = []

    def pack(trainer: L.Trainer, module: L.LightningModule) -> None:
        before = {"of_training": 1} | dict.fromkeys(set(metric_counts(module)) - {"of_training"}, 0)
        metrics = updated_metrics(module, before)
        assert "of_training" not in metrics
        assert why_not_merged(metrics, no_rule) is None
        found.append(pack_results(trainer, metrics))

    evaluated(numbers, pack)
    return found[0]


@pytest.fixture(scope="module")
def whole() -> dict[str, float]:
    return evaluated(range(BATCHES), lambda *_: None)


@pytest.mark.parametrize("parts", [[range(0, 3), range(3, 7)], [[6], [0, 2, 4], [1, 3, 5]]], ids=["two", "three"])
def test_what_parts_logged_is_what_one_process_logs_of_all(whole: dict[str, float], parts: list[Sequence[int]]) -> None:
    each = [packed(numbers) for numbers in parts]
    found = [evaluated(numbers, lambda trainer, _: merge_results(trainer, each)) for numbers in parts]
    assert all(metrics == found[0] for metrics in found), "equal to the last bit, with what only one has logged"
    assert found[0] == pytest.approx(whole, rel=1e-6)
    assert set(whole) >= {"mean", "sum", "max", "min", "only_once", "accuracy", "auroc", "MulticlassPrecision"}


def test_what_only_others_have_logged_may_be_logged_later() -> None:
    """A value that was logged by others first, then by nobody, then by this pipeline, then by others again."""
    each = [packed([3]), packed([0])]
    found: list[dict[str, float]] = []

    class Repeated(Model):
        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            super().validation_step(batch, 3 if len(found) == 2 else 0)
            if batch_idx == 0 and len(found) in (0, 3):
                merge_results(self.trainer, each)

        def on_validation_end(self) -> None:
            found.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    trainer = quiet_trainer(enable_checkpointing=False)
    model, loader = Repeated(), torch.utils.data.DataLoader(Part([0]), batch_size=None)
    for _ in range(4):
        trainer.validate(model, loader, verbose=False)
    assert [("only_once" in metrics) for metrics in found] == [True, False, True, True]
    assert found[0]["only_once"] == found[3]["only_once"] != found[2]["only_once"]


def test_a_metric_goes_on_after_it_was_merged() -> None:
    """It keeps its states in a list, if it did before, and computes again over processes."""
    model = Model()
    scores, labels = batch(0)
    model.auroc.update(scores[:, 0], labels == 0)
    trainer: Any = type(
        "Trainer",
        (),
        {"lightning_module": model, "_results": copy.deepcopy(L.Trainer(logger=False).validate_loop._results)},
    )
    data = pack_results(trainer, {"auroc": model.auroc})
    merge_results(trainer, [data, data])
    assert [len(value) for state in (model.auroc.preds, model.auroc.target) for value in state] == [2 * SIZE] * 2
    twice = BinaryAUROC()
    twice.update(scores[:, 0].repeat(2), (labels == 0).repeat(2))
    assert model.auroc.compute() == twice.compute()


class Own(Metric):
    """Of the user's, with a state that is reduced in some way."""

    def __init__(self, state: str, reduction: Any) -> None:
        super().__init__()
        self.add_state(state, torch.zeros(()), dist_reduce_fx=reduction)

    def update(self, value: Tensor) -> None: ...

    def compute(self) -> Tensor:
        return torch.zeros(())


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        (PearsonCorrCoef(), "'mean_x' of the metric 'mine' has dist_reduce_fx=None"),
        (Own("worst", torch.prod), "'worst' of the metric 'mine' has dist_reduce_fx=prod"),
        (Own("level", "mean"), "'level' of the metric 'mine' has dist_reduce_fx=dim_zero_mean"),
    ],
    ids=["none", "custom", "mean"],
)
def test_a_metric_that_cannot_be_merged_is_named(metric: Metric, reason: str) -> None:
    assert reason in str(why_not_merged({"other": CatMetric(), "mine": metric}, no_rule))
    assert why_not_merged({"other": CatMetric(), "max": MaxMetric(), "min": MinMetric()}, no_rule) is None
    assert "'other' has a dist_sync_fn" in str(why_not_merged({"other": CatMetric()}, lambda _: True))


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=4), min_size=1, max_size=4))
def test_states_are_merged_by_their_own_reductions(parts: list[list[int]]) -> None:
    class Holder(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.most, self.all = MeanMetric(), MaxMetric(), CatMetric()

    def holder(values: Sequence[int]) -> Any:
        module = Holder()
        for metric in (module.mean, module.most, module.all):
            for value in values:
                metric.update(value)
        return type(
            "Trainer", (), {"lightning_module": module, "_results": L.Trainer(logger=False).validate_loop._results}
        )

    trainers = [holder(values) for values in parts]
    each = [pack_results(t, updated_metrics(t.lightning_module, {"mean": 0, "most": 0, "all": 0})) for t in trainers]
    for trainer in trainers:
        merge_results(trainer, each)
        module, together = trainer.lightning_module, [value for values in parts for value in values]
        assert module.mean.compute().item() == pytest.approx(sum(together) / len(together))
        assert module.most.compute().item() == max(together)
        assert module.all.compute().reshape(-1).tolist() == together
