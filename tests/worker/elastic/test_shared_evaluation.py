"""Validation shared among pipelines, on real processes that are killed in the middle of it: each sample counts once."""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanSquaredError, PearsonCorrCoef

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.sync.barriers import Barriers
from tests.loop.numbered import Numbered
from tests.patience import limit
from tests.worker.elastic.jobs import BATCH, FINDING_OUT, Diary, ElasticRun, Model, elastic_run

pytestmark = pytest.mark.distributed

SAMPLES, OF_VALIDATION, OF_EACH = 48, 45, 2  # so the last batch is smaller


class Evaluated(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.error = CatMetric(), MeanSquaredError()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        prediction = self.net(batch[0])
        self.log("val_loss", nn.functional.mse_loss(prediction, batch[0][:, :1]))
        self.log("number", float(len(batch[1])), reduce_fx="sum")
        self.log("largest", batch[1].max().float(), reduce_fx="max")
        if batch_idx == 5:
            self.log("once", batch[0].mean())
        self.seen.update(batch[1])
        self.error(prediction, batch[0][:, :1])
        self.log("error", self.error)

    def on_validation_epoch_end(self) -> None:
        self.log("sum", self.seen.compute().sum())
        assert sorted(self.seen.compute().tolist()) == [*range(OF_VALIDATION)] or self.trainer.sanity_checking
        self.seen.reset()


class Keeping(Evaluated):
    """Keeps what it will need, as Lightning's documentation says."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[float] = []

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.kept += batch[1].tolist()

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("kept", float(sum(self.kept)))
        self.kept.clear()


class Correlated(Evaluated):
    def __init__(self) -> None:
        super().__init__()
        self.correlation = PearsonCorrCoef()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.correlation.update(batch[0][:, 0], batch[1].float())
        self.log("correlation", self.correlation)


class Watch(Callback):
    """Writes down what is evaluated, and what one process would have found. Runs ``dies``, which may end it."""

    def __init__(self, diary: Diary, dies: Callable[[int, int], None]) -> None:
        self.diary, self.dies, self.validations = diary, dies, 0

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validations += 1
        self.batches, self.expected = 0, None
        if module.net[0].weight.is_meta or module.net[-1].weight.is_meta:
            return  # this is one of several stages
        x = torch.stack([Numbered(OF_VALIDATION, 1.0)[k][0] for k in range(OF_VALIDATION)])
        with torch.no_grad():
            self.expected = nn.functional.mse_loss(module.net(x), x[:, :1]).item()

    def on_validation_batch_start(self, *_: Any) -> None:
        self.batches += 1
        self.dies(self.validations, self.batches)

    def on_validation_batch_end(self, trainer: Any, module: Any, _: Any, batch: Any, *__: Any) -> None:
        self.diary.say(validation=self.validations, evaluated=batch[1].tolist())

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.diary.say(validation=self.validations, found=metrics, expected=self.expected)


def fit(
    directory: Path,
    stages: int,
    epochs: int = 3,
    model: type[Evaluated] = Evaluated,
    deaths: tuple[tuple[int, int], ...] = (),
) -> None:
    """``deaths``: the pipeline and rank that dies in a step of the first validation, and before the merge of the
    second."""
    torch.set_num_threads(1)
    logging.basicConfig(filename=directory / "log.txt", level=logging.INFO, force=True)
    logging.getLogger("lightning.pytorch").propagate = True  # not if the root had no handler when it was imported
    me = int(os.environ["SDPIPE_PIPELINE"]), int(os.environ["RANK"])
    diary = Diary(directory)

    def dies(validation: int, batch: int) -> None:
        if deaths[:1] == (me,) and (validation, batch) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)

    watch = Watch(diary, dies)
    gather = Barriers.gather

    def gather_or_die(self: Barriers, *arguments: Any) -> Any:
        if deaths[1:] == (me,) and watch.validations == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(self, *arguments)

    Barriers.gather = gather_or_die  # type: ignore[method-assign]
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=SDPipeStrategy(num_stages=stages, timeout=limit(FINDING_OUT)),
        default_root_dir=directory,
        max_epochs=epochs,
        logger=CSVLogger(directory, flush_logs_every_n_steps=1),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            diary,
            watch,
            EarlyStopping("val_loss", patience=100),
            ModelCheckpoint(monitor="val_loss", save_top_k=1),
        ],
    )
    data, validation = Numbered(SAMPLES, 1.0), Numbered(OF_VALIDATION, 1.0)
    trainer.fit(model(), DataLoader(data, BATCH, shuffle=True), DataLoader(validation, OF_EACH))
    monitor, stopping = trainer.checkpoint_callback, trainer.early_stopping_callback
    assert isinstance(monitor, ModelCheckpoint)
    assert stopping is not None
    diary.say(best=float(monitor.best_model_score), stopping=float(stopping.best_score))  # type: ignore[arg-type]


def rows(run: ElasticRun, pipeline: int, name: str, validation: int) -> list[Any]:
    return [row[name] for row in run.rows(pipeline)[0] if row.get("validation") == validation and name in row]


def check_validation(run: ElasticRun, validation: int, pipelines: list[int]) -> None:
    """All have the same metrics: those that one process would have had of the model."""
    found = [rows(run, pipeline, "found", validation)[0] for pipeline in pipelines]
    assert all(metrics == found[0] for metrics in found), found
    metrics = found[0]
    assert metrics["number"] == OF_VALIDATION
    assert metrics["largest"] == OF_VALIDATION - 1
    assert metrics["sum"] == sum(range(OF_VALIDATION))
    assert metrics["once"] == pytest.approx((21 / OF_VALIDATION + 2) / 4, rel=1e-6)
    assert metrics["error"] == pytest.approx(metrics["val_loss"], rel=1e-6)
    for expected in rows(run, pipelines[0], "expected", validation):
        assert expected is None or metrics["val_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("stages", "pipelines", "deaths"), [(1, 4, ((3, 0), (2, 0))), (2, 3, ((0, 1), (2, 0)))], ids=["whole", "stages"]
)
def test_each_sample_counts_once_whoever_dies(
    tmp_path: Path, stages: int, pipelines: int, deaths: tuple[tuple[int, int], ...]
) -> None:
    """One is killed in a step of the first validation, and one before the merge of the second."""
    with elastic_run(tmp_path, stages, pipelines, work=partial(fit, tmp_path, stages, deaths=deaths)) as run:
        codes = run.codes("the end")
        dead = [pipeline for pipeline, _ in deaths]
        left = [pipeline for pipeline in range(pipelines) if pipeline not in dead]
        assert all(codes[pipeline] == [0] * stages for pipeline in left), run.said()
        assert all(-signal.SIGKILL in codes[pipeline] for pipeline in dead), run.said()
        check_validation(run, 1, [*left, dead[1]])
        check_validation(run, 2, left)
        check_validation(run, 3, left)
        for validation in (1, 2, 3):
            counted = Counter(k for i in left for batch in rows(run, i, "evaluated", validation) for k in batch)
            assert max(counted.values()) == 1, "no survivor repeats what another one has evaluated"
        assert set(counted) == set(range(OF_VALIDATION))
        ends = [[row for row in run.rows(i)[0] if "best" in row] for i in left]
        assert all(len(end) == 1 and end[0]["best"] == ends[0][0]["best"] for end in ends)
        assert all(end[0]["stopping"] == ends[0][0]["stopping"] for end in ends)
        assert "evaluates all of the data" not in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Keeping, "changes 'kept'"), (Correlated, "metric 'correlation' has dist_reduce_fx=None")],
    ids=["kept", "correlation"],
)
def test_what_cannot_be_merged_is_evaluated_by_all(tmp_path: Path, model: type[Evaluated], reason: str) -> None:
    with elastic_run(tmp_path, 1, 2, work=partial(fit, tmp_path, 1, 2, model)) as run:
        codes = run.codes("the end")
        assert codes == {0: [0], 1: [0]}, run.said()
        for validation in (1, 2):
            check_validation(run, validation, [0, 1])
            for pipeline in (0, 1):
                seen = [k for batch in rows(run, pipeline, "evaluated", validation) for k in batch]
                assert sorted(seen) == [*range(OF_VALIDATION)]
        said = (tmp_path / "log.txt").read_text()
        assert said.count("Each pipeline evaluates all of the data: ") == 1
        assert reason in said
