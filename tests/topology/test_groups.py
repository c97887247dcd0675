"""What the processes of a run tell each other first, and the end of one whose groups wait for messages in vain."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.topology.groups import ProcessGroups, compare_meshes, keep_until_the_end, open_groups
from lightning_sdpipe.topology.mesh import Mesh
from tests.own_session import scripts
from tests.patience import limit
from tests.workers import free_port, run_workers


def _fails_amid_a_collective(rank: int, port: int) -> None:
    """Rank 0 ends with an error; rank 1 takes no part, and lives."""
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", where, limit(60), rank=rank, world_size=2)
    if rank == 0:
        dist.all_reduce(torch.ones(8), async_op=True)
        keep_until_the_end(open_groups())
        dist.destroy_process_group()
        raise RuntimeError("something else")
    time.sleep(60)


@pytest.mark.distributed
def test_a_process_that_fails_ends_though_a_collective_is_stuck(tmp_path: Path) -> None:
    port, work = free_port(), _fails_amid_a_collective
    with scripts(tmp_path, (work, 0, port), (work, 1, port)) as (failing, _):
        assert failing.wait() == 1
        assert "something else" in failing.printed()


def _compares(rank: int) -> str:
    try:
        compare_meshes(Mesh.build(4, 1 + rank % 2))
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_ranks_that_were_given_unlike_stages_all_say_so() -> None:
    (said,) = set(run_workers(4, _compares))
    assert "different arguments: num_stages=1 on ranks [0, 2]; num_stages=2 on ranks [1, 3]. Give all the same" in said


def _opens_run_after_run(rank: int) -> list[int]:
    mesh, own = Mesh.build(4, 2), dist.new_group([0, 1])
    groups, counts = ProcessGroups.open(mesh, None), []
    for _ in range(3):
        groups.side_channel(None)
        counts.append(len(open_groups()))
        del groups
        groups = ProcessGroups.open(mesh, None)
    kept = groups if rank == 3 else None  # it may still use them, so no rank closes them
    del groups
    for _ in range(2):
        again = ProcessGroups.open(mesh, None)
        counts.append(len(open_groups()))
        dist.barrier(again.stage)
        del again
    assert kept is None or kept.stage in open_groups()
    assert rank > 1 or own in open_groups(), "the user's"
    return counts


@pytest.mark.distributed
def test_groups_of_earlier_runs_are_closed_when_no_rank_can_use_them() -> None:
    world, own, second, of_a_run = 1, 1, 1, 2
    for rank, counts in enumerate(run_workers(4, _opens_run_after_run)):
        users = world + own * (rank < 2)
        assert counts == [*[users + of_a_run + second] * 3, *[users + 2 * of_a_run] * 2]
