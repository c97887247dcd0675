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
from lightning_sdpipe.pipeline.data import PipelineLoader, check_equal, stand_in
from tests.test_strategy import Regression, data, fit
from tests.workers import run_workers


def noisy(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    return x + torch.randn(x.shape) * random.random() * np.random.rand(), y


def batches(loader: PipelineLoader, disturb: bool) -> list[Tensor]:
    fetched = []
    for x, _ in loader:
        fetched.append(x)
        if disturb:  # a model that draws random numbers between batches
            torch.rand(7)
            random.random()
            np.random.rand()
    return fetched


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stages_that_draw_differently_get_equal_batches(num_workers: int) -> None:
    def loader(pipeline: int = 0, seed: int = 3) -> PipelineLoader:
        plain = DataLoader(data(16), 4, shuffle=True, collate_fn=noisy, num_workers=num_workers)
        return PipelineLoader(plain, pipeline, lambda: (seed, pipeline))

    torch.manual_seed(1)
    first = loader()
    ours = batches(first, disturb=False)
    torch.manual_seed(2)
    theirs = batches(loader(), disturb=True)
    assert len(first) == len(ours) == 4
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], batches(loader(seed=4), disturb=False)[0])
    assert not torch.equal(ours[0], batches(first, disturb=False)[0]), "the next epoch draws anew"


def test_what_is_drawn_while_fetching_does_not_matter_afterwards() -> None:
    def drawn_after(collate: Any) -> Tensor:
        torch.manual_seed(1)
        loader = PipelineLoader(DataLoader(data(8), 4, shuffle=True, collate_fn=collate), 0, lambda: (0,))
        assert loader.batch_size == 4
        draws = [torch.cat([torch.rand(2), torch.tensor([random.random(), np.random.rand()])]) for _ in loader]
        assert not torch.equal(draws[0], draws[1])
        return torch.stack(draws)

    assert torch.equal(drawn_after(noisy), drawn_after(None))


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
