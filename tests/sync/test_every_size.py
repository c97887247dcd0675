"""Methods that keep the mean keep it with one pipeline and with two, on one host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.payloads import EightBit, Full
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.sync.methods import method_of
from tests.exchange.threads import one_thread
from tests.sync.stage import Stage
from tests.sync.test_every_exchange import WORKS, exact, in_threads, start, tolerance, train

SIZES = (1, 2)


@pytest.fixture(scope="module")
def stages() -> Iterator[dict[int, Stage]]:
    with one_thread():
        yield {size: Stage(size) for size in SIZES}


def fits(sync: Any, size: int) -> bool:
    try:
        registry.build(method_of(sync).policy, 1, size)
    except ConfigurationError:
        return False
    return True


CASES = [
    (size, sync, exchange)
    for sync, exchange in [*WORKS, (PartialReduce(group_size=2), Exchange())]
    for size in SIZES
    if in_threads(sync) and isinstance(exchange.payload, Full | EightBit) and fits(sync, size)
]


@pytest.mark.parametrize(("size", "sync", "exchange"), CASES, ids=str)
def test_the_mean_is_kept(
    stages: dict[int, Stage], size: int, sync: Any, exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_sdpipe.sync.mover_choice.hosts_of_replicas", lambda groups, device: ["a"] * size)
    outcomes = stages[size].run(method_of(sync), exchange, start, train)
    expected, moved = exact(size), (exact(size) - start(0)).norm()
    for paused in outcomes:
        assert (paused - outcomes[0]).abs().max() == 0, "replicas differ after a pause"
        assert (paused - expected).norm() <= tolerance(sync, exchange) * moved
