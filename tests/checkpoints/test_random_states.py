from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_sdpipe.checkpoints import random_states
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import Mesh
from tests.patience import limit
from tests.workers import run_workers

CPU = torch.device("cpu")


def draws() -> list[float]:
    values = [float(torch.rand(())), random.random(), float(np.random.rand())]
    return [*values, random.gauss(0, 1)]  # draws a pair, of which the second waits


def resume(rank: int) -> tuple[list[float], list[float], list[float]]:
    groups = ProcessGroups.open(Mesh.build(2, 1), limit())
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank)
    states = random_states.gather(groups, CPU)
    expected = draws()
    everybody = [states]
    torch.distributed.broadcast_object_list(everybody, 0)  # as a checkpoint's file reaches every rank
    random_states.restore(everybody[0], groups, CPU)
    again = draws()
    random_states.restore({**everybody[0], "mesh": [[0, 1]]}, groups, CPU)  # of one pipeline of two stages
    return expected, again, draws()


@pytest.mark.distributed
def test_every_rank_draws_again_what_it_drew_after_the_checkpoint() -> None:
    ranks = run_workers(2, resume)
    assert ranks[0][0] != ranks[1][0]
    for expected, again, elsewhere in ranks:
        assert again == expected
        assert elsewhere != expected, "another mesh has no state of this rank"
