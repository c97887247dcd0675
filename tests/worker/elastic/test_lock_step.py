"""A pipeline that dies while all of its stages call the whole model."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tests.worker.elastic.jobs import SAMPLES, elastic_run, fit


class Sampling(Callback):
    """A loop that calls the model, in which one stage may die."""

    def __init__(self, directory: Path, dies: bool) -> None:
        name = f"samples-{os.environ['SDPIPE_PIPELINE']}-{os.environ['RANK']}"
        self.path, self.dies = directory / name, dies and int(os.environ["RANK"]) == 0

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.eval()
        x = torch.rand(3, 2)
        for turn in range(3):
            x = torch.cat([module.net(x), torch.rand(3, 1)], 1)
            if self.dies and turn == 1 and trainer.global_step == 10:
                os.kill(os.getpid(), signal.SIGKILL)
        module.train()
        with open(self.path, "a") as file:
            print(trainer.global_step, x.tolist(), file=file)


def train(directory: Path, dies: bool = False) -> None:
    fit(directory, SAMPLES, {"num_stages": 2}, more=[Sampling(directory, dies)])


@pytest.mark.slow
@pytest.mark.distributed
def test_the_others_go_on_and_sample(tmp_path: Path) -> None:
    with elastic_run(tmp_path, 2, 2) as run:
        run.lose_and_regain(partial(train, tmp_path, dies=True), partial(train, tmp_path), 2, alone=6, again=6)
        run.finish_well()
        run.check_samples()
    last, first = ((tmp_path / f"samples-0-{rank}").read_text().splitlines() for rank in (0, 1))
    assert len(first) > 12
    assert first == last
