from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_sdpipe.averaging import group_average as module
from lightning_sdpipe.averaging.group_average import group_average
from lightning_sdpipe.errors import WorkerFailedError
from tests.workers import run_workers

SIZES = (1, 2, 3, 1000)
GROUPS: Sequence[tuple[list[int], list[float]]] = [
    ([0, 1, 2, 3], [0.25] * 4),
    ([1, 3], [0.5, 0.5]),
    ([3, 0, 2], [0.5, 0.3, 0.2]),
    ([2], [1.0]),
]


def values(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(10 * rank + size), dtype=torch.float32)


def average_in_groups(rank: int) -> list[torch.Tensor]:
    module.PIECE = 300  # so that the longest buffer has several
    world = dist.group.WORLD
    outcomes = []
    for sequence, (members, weights) in enumerate(GROUPS):
        for size in SIZES:
            buffer = values(rank, size)
            if rank in members:
                group_average(buffer, members, weights, world, sequence)
            outcomes.append(buffer)
    return outcomes


@pytest.mark.distributed
def test_members_get_their_weighted_mean_and_others_keep_theirs() -> None:
    by_rank = run_workers(4, average_in_groups)
    cases = [(members, weights, size) for members, weights in GROUPS for size in SIZES]
    for index, (members, weights, size) in enumerate(cases):
        mean = sum(w * values(m, size).double() for w, m in zip(weights, members, strict=True))
        for rank in range(4):
            expected = mean if rank in members else values(rank, size).double()
            torch.testing.assert_close(by_rank[rank][index].double(), expected, rtol=1e-6, atol=1e-6)
        assert all(torch.equal(by_rank[rank][index], by_rank[members[0]][index]) for rank in members)
        # whatever the group, the mean over the stage stays (equal weights)
        if len(set(weights)) == 1:
            total = sum(by_rank[rank][index].double() for rank in range(4))
            before = sum(values(rank, size).double() for rank in range(4))
            torch.testing.assert_close(total, before, rtol=1e-6, atol=1e-6)


def wait_for_rank_1(rank: int) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    if rank == 0:
        with pytest.raises(WorkerFailedError) as failure:
            group_average(values(rank, 5), [0, 1], [0.5, 0.5], group, 7)
        return str(failure.value)
    return ""


@pytest.mark.distributed
def test_a_member_that_does_not_come_is_named() -> None:
    message, _ = run_workers(2, wait_for_rank_1)
    assert message.startswith("exchanging with rank 1 failed: ")
