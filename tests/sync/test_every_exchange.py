"""The whole product of methods, payloads, overlaps and hierarchies: each combination trains, or is refused with what to
use instead. Real policies and transfers, in threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.payloads import EightBit, Full, Half, OneBit, Payload, TopK
from lightning_sdpipe.exchange.value import Exchange
from lightning_sdpipe.groups import HOST
from lightning_sdpipe.sync import (
    ADPSGD,
    AllReduce,
    HetPipe,
    LocalSGD,
    NoSync,
    ParameterServer,
    PartialReduce,
    SemiDecentralized,
)
from lightning_sdpipe.sync.methods import method_of, refuse_exchange
from lightning_sdpipe.sync.rendezvous import Rendezvous
from lightning_sdpipe.sync.synchronizer import Synchronizer
from tests.exchange.test_group_mean import values
from tests.exchange.threads import one_thread
from tests.sync.stage import Stage

N, SIZE, UPDATES = 4, 1000, 6
METHODS: list[Any] = [
    AllReduce(),
    SemiDecentralized(window=0.005),
    SemiDecentralized(window=float("inf")),
    PartialReduce(group_size=2),
    PartialReduce(group_size=3, decay=0.5),
    ADPSGD(),
    ADPSGD(asynchronous=True),
    LocalSGD(every=1),
    LocalSGD(every=2),
    NoSync(),
    ParameterServer(),
    HetPipe(combine="mean"),
]
PAYLOADS: list[Payload] = [
    Full(),
    Half(),
    Half("bfloat16"),
    EightBit(block=64),
    EightBit(block=64, rounding="stochastic"),
    EightBit(block=64, feedback=True),
    OneBit(block=64),
    OneBit(block=64, feedback=False),
    OneBit(block=64, after=2),
    OneBit(block=64, momentum=0.9, after=2),
    TopK(0.5),
]
PRODUCT = [
    pytest.param(sync, Exchange(payload, overlap, hierarchy), id=f"{sync}-{payload}-{overlap}-{hierarchy}")
    for sync, payload, overlap, hierarchy in itertools.product(
        METHODS, PAYLOADS, ("none", "step", "free"), ("flat", "hosts")
    )
]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with one_thread():
        yield Stage(N)


def start(pipeline: int) -> Tensor:
    return 10 * values(99, SIZE)


def update(pipeline: int, number: int) -> Tensor:
    return 0.1 * values(1000 + 10 * number + pipeline, SIZE)


def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> tuple[Tensor, Tensor]:
    rendezvous.join()
    for number in range(UPDATES):
        change = update(pipeline, number)
        if sync.gradients is not None:
            sync.gradients.complete([change])
            (mean,) = sync.gradients.finish()
            assert mean is not None
            change = mean
        sync.announce(number)
        parameter.data.add_(change)
        sync.synchronise()
    ended = parameter.detach().clone()
    rendezvous.pause(position=UPDATES)
    return ended, parameter.detach().clone()


def exact() -> Tensor:
    """Where all methods lead that preserve means."""
    return start(0) + torch.stack([update(p, k) for p in range(N) for k in range(UPDATES)]).sum(0) / N


def tolerance(sync: Any, payload: Payload) -> float:
    """Of the root mean square of the error at the end, as a share of that of what training has moved by."""
    if isinstance(sync, PartialReduce) and sync.decay is not None:
        return 2.0  # it does not keep the mean
    if isinstance(payload, OneBit | TopK):
        return 0.9
    if isinstance(sync, AllReduce | LocalSGD):
        return {Full: 1e-5, Half: 1e-2}.get(type(payload), 2e-2)
    return 1e-3  # the mean over the workers stays where it is, whatever is left out


@pytest.mark.parametrize(("sync", "exchange"), PRODUCT)
def test_it_trains_or_is_refused(
    stage: Stage, sync: Any, exchange: Exchange, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    method, refusal = method_of(sync), ""
    try:
        refuse_exchange(sync, method, exchange)
    except ConfigurationError as refused:
        refusal = str(refused)
    if refusal:
        assert any(word in refusal for word in ("use ", "leave ", "average models with LocalSGD"))
        assert f"exchange={exchange} does not go with sync={sync}" in refusal
        return
    monkeypatch.setattr("lightning_sdpipe.sync.exchanges.host_names", lambda groups, device: ["a", "a", "b", "b"])
    outcomes = stage.run(method, exchange, start, train)
    expected, moved = exact(), (exact() - start(0)).norm()
    for _, paused in outcomes:
        assert torch.equal(paused, outcomes[0][1]), "replicas differ after a pause"
        assert (paused - expected).norm() <= tolerance(sync, exchange.payload) * moved


def test_nearly_half_of_the_product_works() -> None:
    """So that no refusal gets too broad unnoticed."""

    def works(sync: Any, exchange: Exchange) -> bool:
        try:
            refuse_exchange(sync, method_of(sync), exchange)
        except ConfigurationError:
            return False
        return True

    assert sum(works(*case.values) for case in PRODUCT) == 0  # type: ignore[arg-type]


def test_names_of_hosts_come_from_the_environment_or_the_machine() -> None:
    assert HOST == "SDPIPE_HOST"
