"""Elastic runs whose pipelines have no flush: batches are in flight when one gives its state, leaves, or is killed."""

from __future__ import annotations

import signal
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.worker.training import Phase
from tests.worker.elastic import jobs
from tests.worker.elastic.jobs import SAMPLES, Diary, elastic_run, fit

pytestmark = pytest.mark.distributed

STAGES = 3


class LateDiary(Diary):
    """Writes down each batch when its own update is made, which is some turns after its forward."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.in_flight: deque[tuple[int, list[int]]] = deque()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, SDPipeStrategy)
        if strategy.training.phase is not Phase.ABSENT:
            self.in_flight.append((trainer.current_epoch, batch[1].tolist()))

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, _: Any) -> None:
        epoch, batch = self.in_flight.popleft()
        self.say(trained=batch, epoch=epoch, left=len(self.in_flight))

    def on_save_checkpoint(self, *_: Any) -> None:
        """Of a newcomer, too: the donor has nothing in flight."""
        self.say(saves=len(self.in_flight))


def fit_without_flush(directory: Path) -> None:
    jobs.Diary = LateDiary  # type: ignore[misc]
    fit(directory, samples=SAMPLES, options={"num_stages": STAGES, "schedule": "pipedream"})


def test_who_gives_its_state_or_leaves_drains_and_what_was_in_flight_at_a_death_is_dealt_again(tmp_path: Path) -> None:
    work = partial(fit_without_flush, tmp_path)
    with elastic_run(tmp_path, STAGES, 2, work=work) as run:
        run.wait_for_turns([0, 1], 12)
        run.kill(1, rank=1)
        run.wait(lambda: run.ended(1), "the end of the other stages")
        run.wait_for_turns([0], 5)
        run.comes_back(1, work, 10)
        run.kill(0, number=signal.SIGTERM)
        run.wait(lambda: run.ended(0), "the end of pipeline 0")
        run.wait_for_turns([1], 5)
        codes = run.finish()
        assert codes == {0: [128 + signal.SIGTERM] * STAGES, 1: [0] * STAGES}, run.said()
        assert "pipeline 0 left" in run.said()
        for rank in range(STAGES):
            rows = [row for pipeline in range(2) for start in run.rows(pipeline, rank) for row in start]
            run.check_samples(rank=rank)
            assert {row["left"] for row in rows if "left" in row} == set(range(rank + 1))
            assert {row["saves"] for row in rows if "saves" in row} == {0}
            last = [row for row in run.rows(0, rank)[-1] if "left" in row][-1]
            assert last["left"] == 0, "who leaves has drained"
            donor = sum("saves" in row for row in run.rows(0, rank)[-1])
            assert donor > sum("saves" in row for row in run.rows(1, rank)[0]), "a state was given"
            first = run.rows(1, rank)[-1][0]
            assert min(first["moments"], first["started"]) > 0
        run.check_replicas([1])
