"""A pipeline whose numbers are not finite any more ends the run before its model reaches the others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import SpikeDetection
from torch import Tensor

from lightning_sdpipe import ADPSGD, AllReduce, LocalSGD, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.errors import NonFiniteError, WorkerFailedError
from tests.features.running import Regression, on_four_ranks, pipelines, train_loader, weights
from tests.features.table import supported

pytestmark = pytest.mark.distributed


class Breaking(Regression):
    """The loss of pipeline 1, or the gradients of its first stage alone, break in the third mini-batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.batch = kind, 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.batch = batch_idx
        loss = super().training_step(batch, batch_idx)  # the last stage only comes to the end of this
        breaks = self.kind == "loss" and self.global_rank == 2 and batch_idx == 2
        return loss * (float("nan") if breaks else 1.0)

    def on_train_start(self) -> None:
        if self.kind == "gradient" and self.global_rank == 3:
            self.net[0].weight.register_hook(lambda gradient: gradient / float(self.batch != 2))


def _train(directory: Path, kind: str, sync: Any, schedule: Any, on_nonfinite: Any) -> tuple[str, bool]:
    """The error's message, and whether all that this rank holds is finite."""
    strategy, module = (
        SDPipeStrategy(2, sync, schedule=schedule, data="sharded", on_nonfinite=on_nonfinite),
        Breaking(kind),
    )
    trainer = pipelines(directory, strategy, max_epochs=1)
    message = ""
    try:
        trainer.fit(module, train_loader())
    except (NonFiniteError, WorkerFailedError) as error:
        message = str(error)
    return message, all(bool(value.isfinite().all()) for value in weights(module).values())


@supported("Trainer", "a loss, gradients or parameters that are not finite",
           'end the run with the name of the pipeline, before others get its model; '
           '`SDPipeStrategy(on_nonfinite="continue")` goes on')  # fmt: skip
@pytest.mark.parametrize(
    ("kind", "sync", "schedule", "named"),
    [
        ("loss", SemiDecentralized(), "1f1b", r"the loss of mini-batch 2, .* on stage 1 of pipeline 1"),
        ("loss", ADPSGD(asynchronous=True), "pipedream", r"the loss of mini-batch 2, .* on stage 1 of pipeline 1"),
        ("gradient", LocalSGD(every=2), "gpipe", r"the parameters after update 2, .* on stage 0 of pipeline 1"),
        ("gradient", AllReduce(), "1f1b", r"the gradients of pipelines \[1\], stage 0, for update 2"),
    ],
)
def test_the_pipeline_is_named(tmp_path: Path, kind: str, sync: Any, schedule: str, named: str) -> None:
    ranks = on_four_ranks(_train, tmp_path, kind, sync, schedule, "stop")
    for message, _ in ranks:  # a stage that its neighbour's infinity has reached may have been first
        assert re.search(rf"Not finite: ({named}|.* stage . of pipeline 1)", message), message
    assert any(re.search(named, message) for message, _ in ranks)
    assert ranks[0][1]
    assert ranks[1][1]


def test_a_run_may_go_on(tmp_path: Path) -> None:
    ranks = on_four_ranks(_train, tmp_path, "loss", AllReduce(), "1f1b", "continue")
    assert ranks == [("", False)] * 4


def _spike(directory: Path) -> str:
    callback = SpikeDetection(exclude_batches_path=directory, rtol=100.0)
    strategy = SDPipeStrategy(2)  # whose batches would be dealt
    with pytest.raises(TrainingSpikeException) as found:
        pipelines(directory, strategy, max_epochs=1, callbacks=[callback]).fit(Breaking("loss"), train_loader())
    return str(found.value)


def test_lightnings_callback_decides_by_itself(tmp_path: Path) -> None:
    assert set(on_four_ranks(_spike, tmp_path)) == {"Training spike detected in batch 2"}
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == [1, 2]
