"""What the processes of a run tell each other first, and the end of one whose groups wait for messages in vain."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.topology.groups import compare_meshes, keep_until_the_end, open_groups
from lightning_sdpipe.topology.mesh import Mesh
from tests.own_session import script
from tests.workers import free_port, run_workers


def _fails_amid_a_collective(rank: int, port: int) -> None:
    """Rank 0 ends with an error; rank 1 takes no part, and lives."""
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", where, timedelta(seconds=60), rank=rank, world_size=2)
    if rank == 0:
        dist.all_reduce(torch.ones(8), async_op=True)
        keep_until_the_end(open_groups())
        dist.destroy_process_group()
        raise RuntimeError("something else")
    time.sleep(60)


@pytest.mark.distributed
def test_a_process_that_fails_ends_though_a_collective_is_stuck(tmp_path: Path) -> None:
    port, work = free_port(), _fails_amid_a_collective
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    with script(tmp_path / "1", work, 1, port), script(tmp_path / "0", work, 0, port) as failing:
        assert failing.wait(30) == 1
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
    assert "unlike arguments: num_stages=1 on ranks [0, 2]; num_stages=2 on ranks [1, 3]. Give all the same" in said
