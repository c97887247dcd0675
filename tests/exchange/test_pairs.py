"""Two workers average what goes on changing meanwhile."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.exchange import moving
from lightning_sdpipe.exchange.pairs import PairMean
from lightning_sdpipe.topology.groups import Replicas
from tests.exchange.test_group_mean import group, values
from tests.workers import run_workers


def average(rank: int, weights: tuple[float, float]) -> Tensor:
    """Its own updates come between the copy of a piece and its commit."""
    moving.PIECE = 40
    published = values(rank, 100)
    mover = PairMean(Replicas(dist.group.WORLD, range(2), 0, rank), threading.Lock())  # type: ignore[arg-type]
    pending = mover.start([published], group((0, 1), weights))
    while pending.wait():
        published.add_(rank + 1.0)
        pending.commit()
    return published


@pytest.mark.distributed
@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.25, 0.75)])
def test_no_update_is_lost_and_equal_weights_keep_the_sum(weights: tuple[float, float]) -> None:
    first, second = run_workers(2, average, weights)
    steps = torch.arange(100) // 40  # a piece has had as many updates when its copy was taken
    models = [values(rank, 100) + (rank + 1.0) * steps for rank in range(2)]
    updates = [(rank + 1.0) * (3 - steps) for rank in range(2)]
    mean = weights[0] * models[0] + weights[1] * models[1]
    torch.testing.assert_close(first, mean + updates[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second, mean + updates[1], rtol=1e-5, atol=1e-5)
    if weights[0] == weights[1]:
        torch.testing.assert_close(first + second, values(0, 100) + values(1, 100) + 9.0)
