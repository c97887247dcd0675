"""The leader's files, and who goes on with them."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_sdpipe.worker.elastic import leader as leading


@pytest.fixture(autouse=True)
def rank_zero() -> Iterator[None]:
    yield
    leading.take_place(0, True)


def trainer(directory: Path) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(
        accelerator="cpu", devices=1, logger=CSVLogger(directory), callbacks=[ModelCheckpoint(save_top_k=-1)], **quiet
    )


def test_one_process_of_the_run_is_rank_zero() -> None:
    leading.take_place(0, False)
    assert rank_zero_only.rank != 0  # type: ignore[attr-defined]
    leading.take_place(1, True)
    assert rank_zero_only.rank == 1  # type: ignore[attr-defined]
    leading.take_place(0, True)
    assert rank_zero_only.rank == 0  # type: ignore[attr-defined]


def test_who_leads_next_writes_where_the_leader_wrote_and_deletes_nothing(tmp_path: Path) -> None:
    leader = trainer(tmp_path)
    leader.checkpoint_callbacks[0].dirpath = "the leader's"  # type: ignore[attr-defined]
    leader.logger.log_metrics({"loss": 1.0}, 4)  # type: ignore[union-attr]
    leader.logger.save()  # type: ignore[union-attr]
    leading.take_place(0, False)
    other = trainer(tmp_path)
    assert other.logger.version == 1  # type: ignore[union-attr]  # by itself it would begin another directory
    leading.adopt(other, leading.names(leader))
    assert other.checkpoint_callbacks[0].dirpath == "the leader's"  # type: ignore[attr-defined]
    other.logger.log_metrics({"loss": 99.0}, 5)  # type: ignore[union-attr]  # it does not lead yet
    leading.take_place(0, True)
    leading.go_on(other)
    other.logger.log_metrics({"loss": 2.0, "val": 3.0}, 9)  # type: ignore[union-attr]
    other.logger.save()  # type: ignore[union-attr]
    rows = list(csv.DictReader((tmp_path / "lightning_logs/version_0/metrics.csv").open()))
    assert rows == [{"loss": "1.0", "step": "4", "val": ""}, {"loss": "2.0", "step": "9", "val": "3.0"}]


class Bar(ProgressBar):
    """Notes what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def enable(self) -> None:
        self.heard.append("enable")

    def disable(self) -> None:
        """It is off where rank zero is elsewhere."""

    def on_train_start(self, *_: object) -> None:
        self.heard.append("start")


def shown(directory: Path) -> tuple[L.Trainer, Bar]:
    bar = Bar()
    logger = CSVLogger(directory)
    return L.Trainer(accelerator="cpu", devices=1, logger=logger, callbacks=[bar], enable_checkpointing=False), bar


def test_the_first_of_those_that_are_present_leads(tmp_path: Path) -> None:
    lead = leading.Leadership(0, pipeline=2)
    assert rank_zero_only.rank != 0  # type: ignore[attr-defined]
    other, bar = shown(tmp_path)
    lead.take([1, 2])
    lead.begin(other)
    assert (lead.held, bar.heard) == (False, [])
    lead.take([2, 3])
    assert rank_zero_only.rank == 0  # type: ignore[attr-defined]
    assert (lead.held, bar.heard) == (True, ["enable", "start"]), "it goes on where another one was"
    lead.take([2, 3])
    assert bar.heard == ["enable", "start"], "once"
    lead.take([0, 2])
    assert not lead.held
    assert rank_zero_only.rank != 0  # type: ignore[attr-defined]


def test_a_pipeline_that_leads_from_the_beginning_takes_over_from_none(tmp_path: Path) -> None:
    lead = leading.Leadership(0, pipeline=0)
    first, bar = shown(tmp_path)
    lead.take([0, 1])
    lead.begin(first)
    assert bar.heard == ["enable"]
    lead.take([1])
    lead.take([0, 1])
    assert lead.held
    assert bar.heard == ["enable"]
