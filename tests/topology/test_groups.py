"""The end of a process whose groups wait for messages that never come."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_sdpipe.topology.groups import keep_until_the_end, open_groups
from tests.own_session import script
from tests.workers import free_port


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
