from collections.abc import Iterator
from contextlib import closing

import pytest
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_sdpipe.errors import LOST_CONNECTION, WorkerFailedError
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.worker.scheduler_connection import SchedulerAddress, SchedulerConnection
from tests.scheduler.live_scheduler import OrdinaryClient, clients, serving


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SchedulerConnection, OrdinaryClient]]:
    """A run of two pipelines of one stage: this process's worker is the first, a mere client the other."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    spec = AllReduceModels()
    with serving(spec, 1, 2) as server, clients(server.address, Worker(0, 1)) as (other,):
        other.greet()
        where = SchedulerAddress(server.address, None)
        with closing(SchedulerConnection(Mesh.build(2, 1), spec, 5, where, str, 5.0, lambda: None)) as membership:
            yield membership, other


def hear(membership: SchedulerConnection, told_to_end: bool) -> None:
    try:
        raise WorkerFailedError("connection closed by peer")
    except WorkerFailedError as error:
        membership.explain(error, lambda: told_to_end)
        raise


@pytest.mark.parametrize("told_to_end", [False, True])
def test_who_failed_first_is_named_with_the_reason(
    pair: tuple[SchedulerConnection, OrdinaryClient], told_to_end: bool
) -> None:
    membership, other = pair
    other.failed("out of memory")
    with pytest.raises(WorkerFailedError, match=r"Stage 0 of pipeline 1 \(rank 1\) failed first .* out of memory"):
        hear(membership, told_to_end)


def test_told_to_end_like_another_that_was_faster(pair: tuple[SchedulerConnection, OrdinaryClient]) -> None:
    membership, other = pair
    other.failed("ended by SIGTERM")
    with pytest.raises(SIGTERMException):
        hear(membership, told_to_end=True)
    with pytest.raises(WorkerFailedError, match="ended by SIGTERM"):
        hear(membership, told_to_end=False)


@pytest.mark.parametrize("exception", [SIGTERMException(), SystemExit(143)])
def test_ones_own_failure_stays_what_it_was(
    pair: tuple[SchedulerConnection, OrdinaryClient], capsys: pytest.CaptureFixture[str], exception: SystemExit
) -> None:
    membership, other = pair
    membership.fail(exception)
    assert "Stage 0 of pipeline 0 (rank 0) was ended by SIGTERM." in capsys.readouterr().err
    with pytest.raises(WorkerFailedError, match="connection closed by peer"):
        hear(membership, told_to_end=False)
    assert other.first_failure(5.0) is not None


def test_what_came_from_another_is_not_told_again(pair: tuple[SchedulerConnection, OrdinaryClient]) -> None:
    membership, other = pair
    membership.fail(WorkerFailedError("Stage 0 of pipeline 1 failed first"))
    assert other.first_failure(0.5) is None


def test_a_connection_that_is_lost_while_all_live_is_told(pair: tuple[SchedulerConnection, OrdinaryClient]) -> None:
    """The others would hear that this worker was told to end."""
    membership, other = pair
    membership.fail(
        WorkerFailedError(f"receiving from rank 1 failed: [{LOST_CONNECTION}/tcp/pair.cc] Connection reset")
    )
    failure = other.first_failure(5.0)
    assert failure is not None
    assert "receiving from rank 1 failed" in failure.reason


def test_a_standing_scheduler_serves_one_fit_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with serving(AllReduceModels(), 1, 1) as server:
        where = SchedulerAddress(server.address, None)
        for run in (5, 6, 7):
            with closing(
                SchedulerConnection(Mesh.build(1, 1), AllReduceModels(), run, where, str, 5.0, lambda: None)
            ) as membership:
                membership.client.join()
                membership.client.ready(0)
                assert membership.client.group().members == (Worker(0, 0),)
                membership.client.leave()
        assert server.service.refused == {}
        assert server.service.failure is None
