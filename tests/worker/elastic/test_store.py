"""The scheduler's key-value store as torch knows stores: process groups are made over it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.scheduler.client.client import CancelledError, SchedulerClient
from lightning_sdpipe.worker.elastic.scheduler_connection import SchedulerStore
from tests.exchange.threads import together
from tests.patience import limit
from tests.scheduler.live_scheduler import serving

SIZE = 3


def test_replicas_find_each_other_through_the_scheduler() -> None:
    terms = ElasticConfig(start_pipelines=SIZE, settle=0.0)
    asked: dict[int, int] = {}

    def replica(address: str, pipeline: int) -> float:
        client = SchedulerClient(address, Worker(0, pipeline), 100 + pipeline, timeout=600)
        client.enrol({})
        line = client.wire
        ask, asked[pipeline] = line.ask, 0

        def counted(*arguments: Any, **more: Any) -> Any:
            asked[pipeline] += 1
            return ask(*arguments, **more)

        setattr(line, "ask", counted)  # noqa: B010
        store = SchedulerStore(client, "epoch-1-0", 20.0)
        group = dist.ProcessGroupGloo(store, pipeline, SIZE, limit())
        tensor = torch.full((4,), float(pipeline))
        group.allreduce([tensor]).wait()
        client.close()
        return tensor.sum().item()

    with serving(NoSync(), 1, SIZE, elastic=terms) as server:
        assert together(SIZE, partial(replica, server.address)) == [12.0] * SIZE
    assert asked == dict.fromkeys(range(SIZE), SIZE), "each sets its address, and asks once for that of each other"


def test_waits_end_when_they_are_cancelled_or_in_vain() -> None:
    with serving(NoSync(), 1, 1, elastic=ElasticConfig(settle=0.0)) as server:
        client = SchedulerClient(server.address, Worker(0, 0), 7, timeout=600)
        try:
            client.enrol({})
            gone: list[bool] = []
            store = SchedulerStore(client, "room", 0.2, lambda: bool(gone))
            store.set("here", "1")
            assert store.get("here") == b"1"
            assert store.add("count", 2) == 2
            assert [store.check(["here"]), store.check(["here", "there"])] == [True, False]
            with pytest.raises(SchedulerError, match=r"waited 0\.2 s for another worker to set room/there"):
                store.wait(["there"])
            gone.append(True)
            with pytest.raises(CancelledError, match="room"):
                store.wait(["there"])
            assert store.delete_key("here")
            with pytest.raises(ValueError, match="without a slash"):
                SchedulerStore(client, "a/b", 1.0)
        finally:
            client.close()
