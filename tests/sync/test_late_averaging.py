"""Partial reduce between real processes, with a real scheduler: the weights that it decides reach the models."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.sync import PartialReduce
from lightning_sdpipe.sync.methods import method_of
from tests.sync.stage import in_a_process
from tests.workers import run_workers

WORKERS = 3
TURNS = [(0, 1)] * 4 + [(0, 2), (1, 2), (0, 1)]
"""Who comes, one pair after the other."""


def start(rank: int) -> Tensor:
    return torch.randn(7, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def take_turns(rank: int, decay: float | None) -> tuple[list[Tensor], list[float]]:
    """This worker's model after each of its groups, with a learning rate of 0, and the mean of how many it is."""
    parameter = nn.Parameter(start(rank))
    method = method_of(PartialReduce(group_size=2, decay=decay))
    models: list[Tensor] = []
    counts, iteration = [], 0
    with in_a_process(rank, WORKERS, method, parameter) as (sync, rendezvous):
        for turn in TURNS:
            if rank in turn:
                sync.announce(iteration)
                assert sync.shares_next
                assert not sync.announced, "the scheduler was told before the step"
                sync.synchronise()
                models.append(parameter.detach().clone())
                counts.append(sync.models_averaged)
                iteration += 1
            dist.barrier()
        rendezvous.pause(position=len(TURNS))
    assert sync.statistics.mean_group_size == 2.0
    return models, counts


@pytest.mark.distributed
def test_dynamic_weights_reach_the_models() -> None:
    """After four groups of 0 and 1 pipeline 0 has k = 5 where pipeline 2 has 1. Ranks 1 to 3 are closer to 1 than to 5:
    (16 + 8 + 4)/31 and (2 + 1)/31."""
    (first, counts), _, (last, counts_of_last) = run_workers(WORKERS, take_turns, 0.5)
    mean = (start(0) + start(1)) / 2
    torch.testing.assert_close(first[3], mean)
    torch.testing.assert_close(first[4], 28 / 31 * mean + 3 / 31 * start(2))
    assert torch.equal(first[4], last[0])
    inequality = 2 * (28**2 + 3**2) / 31**2
    assert counts == pytest.approx([3, 3, 3, 3, 3 / ((4 + inequality) / 5), 3 / ((4 + inequality + 10 / 9) / 6)])
    assert counts_of_last[0] == pytest.approx(3 / inequality)


@pytest.mark.distributed
def test_constant_weights_leave_the_mean_where_it_is() -> None:
    outcomes = run_workers(WORKERS, take_turns, None)
    before = torch.stack([start(rank) for rank in range(WORKERS)])
    after = torch.stack([models[-1] for models, _ in outcomes])
    assert {count for _, counts in outcomes for count in counts} == {3.0}
    assert not torch.allclose(after, before)
    drift = (after.mean(0) - before.mean(0)).abs().max() / before.abs().max()
    assert drift <= 1e-15
