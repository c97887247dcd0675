"""A metric that the end of a step updates and its beginning reads: two stages know different values of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_sdpipe import AllReduce, SDPipeStrategy
from tests.features.running import Regression, on_four_ranks, pipelines, train_loader

pytestmark = pytest.mark.distributed


class Scaled(Regression):
    def __init__(self, late: bool) -> None:
        super().__init__()
        self.seen, self.late = MeanMetric(), late

    def scale(self, batch_idx: int) -> Tensor:
        if self.late:  # what is rehearsed is the first batch
            return self.seen.compute() if batch_idx else torch.ones(())
        return self.seen.compute() if self.seen.update_called else torch.ones(())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x * self.scale(batch_idx)), y)
        self.seen.update(loss.detach())
        return loss


def _train(directory: Path, late: bool) -> str:
    try:
        pipelines(directory, SDPipeStrategy(2, AllReduce())).fit(Scaled(late), train_loader())
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("late", "message"),
    [
        (False, "training_step keeps a value from one batch to the next"),
        (True, "The metric 'seen' is computed in a step on a stage that has never updated it"),
    ],
)
def test_it_is_refused(tmp_path: Path, late: bool, message: str) -> None:
    messages: list[Any] = on_four_ranks(_train, tmp_path, late, count=2)
    assert all(message in found for found in messages), messages
