from contextlib import closing
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler.credentials import own_keys, read_scheduler_keys, write_keys
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.worker.scheduler_connection import SchedulerConnection, standing_scheduler
from tests.scheduler.live_scheduler import serving
from tests.workers import run_workers

MESH = (4, 2)


def take_part(rank: int, address: str | None) -> tuple[int, bool]:
    mesh = Mesh.build(*MESH)
    standing = standing_scheduler(address, None)
    with closing(
        SchedulerConnection(mesh, AllReduceModels(), 5, standing, lambda: "tcp://127.0.0.1:*", 20.0, lambda: None)
    ) as membership:
        client = membership.client
        client.join()
        dist.barrier()
        client.ready(0)
        members = len(client.group().members)
        dist.barrier()
    return members, membership.client.credentials is not None


@pytest.mark.distributed
def test_rank_zero_starts_one_and_everybody_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SDPIPE_SCHEDULER", raising=False)
    assert run_workers(4, take_part, None) == [(2, True)] * 4


@pytest.mark.distributed
def test_a_scheduler_that_runs_already_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the keys of this account, where none are named."""
    keys = read_scheduler_keys(own_keys()[0])
    with serving(SemiDecentralized(window=30.0), 2, 2, keys=keys) as standing:
        monkeypatch.setenv("SDPIPE_SCHEDULER", standing.address)
        assert run_workers(4, take_part, None) == [(2, True)] * 4


def test_the_key_file_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler_file, worker_file = write_keys(tmp_path)
    monkeypatch.setenv("SDPIPE_KEY_FILE", str(worker_file))
    where = standing_scheduler("tcp://10.0.0.1:5555", None)
    assert where is not None
    assert where.keys is not None
    assert where.keys.scheduler_public == read_scheduler_keys(scheduler_file).public


@pytest.mark.parametrize(
    ("given", "named"), [("10.0.0.1:5555", "scheduler='10"), (None, "SDPIPE_SCHEDULER='localhost'")]
)
def test_an_address_without_its_kind_is_refused_before_any_process_starts(
    given: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDPIPE_SCHEDULER", "localhost")
    with pytest.raises(ConfigurationError, match=f"{named}.* is no address, as in tcp://10.0.0.1:5555"):
        standing_scheduler(given, None)
