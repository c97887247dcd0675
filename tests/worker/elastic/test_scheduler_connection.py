"""What becomes of failures: whoever fails has not finished, whether it says why or not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import Epoch
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.scheduler.client.client import Callbacks, SchedulerClient
from lightning_sdpipe.worker.elastic.scheduler_connection import ElasticConnection
from lightning_sdpipe.worker.scheduler_connection import SchedulerAddress
from tests.patience import until
from tests.scheduler.live_scheduler import serving


class Other:
    """Pipeline 1, which goes on."""

    def __init__(self, address: str) -> None:
        self.epochs: list[Epoch] = []
        told = Callbacks(epoch=self.epochs.append)
        self.client = SchedulerClient(address, Worker(0, 1), 101, timeout=600, told=told)

    def hears(self, lost: int) -> str:
        return str(until(lambda: [epoch.reason for epoch in self.epochs if lost in epoch.lost])[0])


@pytest.fixture
def pair() -> Iterator[tuple[ElasticConnection, Other]]:
    with serving(NoSync(), 1, 2, elastic=ElasticConfig(start_pipelines=2, settle=0.0)) as server:
        where = SchedulerAddress(server.address, None)
        other = Other(server.address)
        membership = ElasticConnection(where, Worker(0, 0), 100, 10.0, Callbacks(), lambda: None)
        with closing(other.client):
            enrolling = threading.Thread(target=other.client.enrol, args=[{}])
            enrolling.start()
            membership.client.enrol({})
            enrolling.join()
            yield membership, other


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (ValueError("a bug"), "failed: ValueError: a bug"),
        (WorkerFailedError("it came to a barrier when the others had gone on"), "its connection closed"),
        (SIGTERMException(), "was told to end"),
        (SystemExit(143), "was told to end"),
    ],
    ids=["its own", "of others", "notice", "exit"],
)
def test_who_failed_is_lost(pair: tuple[ElasticConnection, Other], failure: BaseException, said: str) -> None:
    membership, other = pair
    membership.fail(failure)
    membership.depart(finished=True)  # as the teardown does
    membership.close()
    assert said in other.hears(lost=0)


def test_who_has_finished_is_not_lost(pair: tuple[ElasticConnection, Other]) -> None:
    membership, other = pair
    membership.depart(finished=True)
    membership.close()
    other.client.fetch(["nothing/there"])
    assert all(epoch.lost == () for epoch in other.epochs)
