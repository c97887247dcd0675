from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.groups import ProcessGroups
from lightning_sdpipe.mesh import Mesh
from lightning_sdpipe.pipeline.data import check_equal, stand_in
from tests.test_strategy import Regression, data, fit
from tests.workers import run_workers


def noisy(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    return x + torch.randn(x.shape) * random.random() * np.random.rand(), y


class PerProcess(Regression):
    """Draws its noise from a generator that differs between processes."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(self.global_rank)
        return DataLoader(data(16), 4, collate_fn=lambda s: (noisy(s)[0] + torch.rand(1, generator=generator), s[0][1]))


@pytest.mark.distributed
def test_different_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="The stages of a pipeline were given different batches"):
        fit(tmp_path, SDPipeStrategy(2, start_method="fork"), 2, 4, module=PerProcess())


def compare(rank: int, case: str) -> bool:
    groups = ProcessGroups.open(Mesh.build(2, 2), timedelta(seconds=20))
    first = groups.mesh.locate(rank)[0] == 0
    images, labels = torch.ones(4, 3), torch.arange(4)
    batch = {
        "stand-in": [images if first else stand_in((4, 3)), labels],
        "stand-in of another shape": [images if first else stand_in((4, 2)), labels],
        "stand-in and other labels": [images if first else stand_in((4, 3)), labels + rank],
        "a tensor less": [images, labels][: 1 + first],
    }[case]
    try:
        check_equal(batch, groups)
    except ConfigurationError:
        return False
    return True


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "equal"),
    {
        "stand-in": True,
        "stand-in of another shape": False,
        "stand-in and other labels": False,
        "a tensor less": False,
    }.items(),
)
def test_inputs_may_be_left_unread_where_they_are_not_needed(case: str, equal: bool) -> None:
    assert run_workers(2, compare, case) == [equal, equal]
