"""Asynchronous AD-PSGD and parameter servers between real processes, with a real scheduler."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.sync import ADPSGD
from lightning_sdpipe.sync.methods import method_of
from lightning_sdpipe.sync.synchronizer import SyncMethod
from tests.sync.stage import in_a_process
from tests.workers import run_workers

WORKERS, ITERATIONS = 4, 12


def train(rank: int, method: SyncMethod, starts: float, learn: bool) -> tuple[float, Tensor, Tensor]:
    """The start, this worker's model before the pause and after it. Rank 3 is a straggler. A hook counts updates in a
    frozen parameter."""
    parameter = nn.Parameter(torch.full((5,), starts * rank))
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    with in_a_process(rank, WORKERS, method, parameter, frozen) as (sync, rendezvous):
        for iteration in range(ITERATIONS):
            before = parameter.detach().clone()
            time.sleep(0.05 if rank == 3 else 0.005)
            assert torch.equal(parameter, before), "the model changed while a gradient was computed on it"
            sync.announce(iteration)
            if learn:
                parameter.data.add_(rank + 1.0)
            frozen.data.add_(1)
            sync.synchronise()
            assert (frozen == iteration + 1).all(), "what is frozen was exchanged"
        ended = parameter.detach().clone()
        rendezvous.pause(position=4)
        dist.barrier()
    assert sync.statistics.groups == ITERATIONS
    assert (frozen == ITERATIONS).all()
    return starts * rank, ended, parameter.detach()


@pytest.mark.distributed
@pytest.mark.parametrize("learn", [False, True])
def test_workers_agree_and_no_update_is_lost(learn: bool) -> None:
    outcomes = run_workers(WORKERS, train, method_of(ADPSGD(asynchronous=True)), 1.0, learn)
    updates = ITERATIONS * sum(rank + 1.0 for rank in range(WORKERS)) if learn else 0.0
    mean = (sum(start for start, _, _ in outcomes) + updates) / WORKERS
    for _, _, paused in outcomes:
        torch.testing.assert_close(paused, torch.full((5,), mean))
    if not learn:
        before_the_pause = torch.stack([ended for _, ended, _ in outcomes])
        assert before_the_pause.std(0).max() < 0.5 * torch.arange(WORKERS).float().std()
