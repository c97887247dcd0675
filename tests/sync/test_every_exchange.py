"""The whole product of methods, payloads, overlaps and hierarchies: each combination is refused with what to use
instead, or trains, with four pipelines, with two on one host, and alone. Real policies and transfers, in threads."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.options import Exchange, Hierarchy, Overlap
from lightning_sdpipe.exchange.payloads import FORMS, EightBit, Full, Half, OneBit, Payload
from lightning_sdpipe.policies import registry
from lightning_sdpipe.sync import PHDPSGD, AllReduce, Decentralized, DiLoCo, LocalSGD, PartialReduce, SemiDecentralized
from lightning_sdpipe.sync.capabilities import Combination
from lightning_sdpipe.sync.methods import check, examples, method_of
from lightning_sdpipe.sync.rendezvous import Rendezvous
from lightning_sdpipe.sync.synchronizer import Synchronizer
from tests.exchange.test_group_mean import values
from tests.sync.stage import Stage, make_update

N, SIZE, UPDATES = 4, 400, 4
SHORT: dict[Any, Any] = {
    SemiDecentralized(): SemiDecentralized(window=0.005),
    PartialReduce(): PartialReduce(group_size=3, decay=0.5),
    PartialReduce(decay=0.5): PartialReduce(group_size=3, decay=0.5),
    LocalSGD(every=1): LocalSGD(every=2),
    LocalSGD(every=8): LocalSGD(every=2),
    DiLoCo(): DiLoCo(every=3, lr=1.0, momentum=0.0, fragments=3, delay=1),
    PHDPSGD(): PHDPSGD(group_size=2),
}
"""For four updates of four pipelines."""
METHODS = [*dict.fromkeys(SHORT.get(each, each) for each in examples() if getattr(each, "weights", "") != "samples")]


def small(payload: Payload) -> Payload:
    """The payload for few values, and few updates."""
    known = {field.name for field in fields(payload)}  # type: ignore[arg-type]
    values = {"block": 64, "after": min(payload.after, 2)}
    return replace(payload, **{name: value for name, value in values.items() if name in known})  # type: ignore[type-var]


PAYLOADS: list[Payload] = [
    *map(small, FORMS.values()),
    EightBit(block=64, rounding="stochastic", feedback=True),
    OneBit(block=64, after=2),
]
PRODUCT = [
    (sync, Exchange(payload, overlap, hierarchy, **({"interval": 0.0} if overlap == "free" else {})))
    for sync, payload, overlap, hierarchy in itertools.product(
        METHODS, PAYLOADS, get_args(Overlap), get_args(Hierarchy)
    )
]


def refusal(sync: Any, exchange: Exchange) -> str | None:
    """Why not, if so."""
    try:
        check(method_of(sync), Combination(sync, exchange))
    except ConfigurationError as refused:
        return str(refused)
    return None


REASONS = [refusal(*combination) for combination in PRODUCT]
WORKS = [combination for combination, reason in zip(PRODUCT, REASONS, strict=True) if reason is None]
LONG = settings.default.max_examples >= 10_000  # --hypothesis-profile=long


def in_threads(sync: Any) -> bool:
    """Tests of their own have the others in processes."""
    return not isinstance(sync, PHDPSGD) or sync.within == "models"


def chosen() -> list[tuple[Any, Exchange]]:
    """Of those that work: every method with every payload, and with overlaps and hierarchies such that any two values
    that work together come together."""
    seen: set[tuple[str, str]] = set()
    found = []
    for sync, exchange in WORKS:
        if not in_threads(sync):
            continue
        plain = (exchange.overlap, exchange.hierarchy) == ("none", "flat")
        values = (str(sync), str(exchange.payload), exchange.overlap, exchange.hierarchy)
        pairs = set(itertools.combinations(values, 2)) - {values[:2]}
        if LONG or plain or not pairs <= seen:
            found.append((sync, exchange))
            seen |= pairs
    return found


def fits(sync: Any, size: int) -> bool:
    try:
        registry.build(method_of(sync).policy, 1, size)
    except ConfigurationError:
        return False
    return True


CASES = [
    *((N, sync, exchange) for sync, exchange in chosen()),
    *(
        (size, sync, exchange)
        for sync, exchange in [*WORKS, (PartialReduce(group_size=2), Exchange())]
        for size in (1, 2)
        if in_threads(sync) and not isinstance(exchange.payload, Half | OneBit) and fits(sync, size)
    ),
]


@pytest.fixture(scope="module")
def stages() -> dict[int, Stage]:
    return {size: Stage(size) for size in (1, 2, N)}


def start(pipeline: int) -> Tensor:
    return 10 * values(99, SIZE)


def update(pipeline: int, number: int) -> Tensor:
    return 0.1 * values(1000 + 10 * number + pipeline, SIZE)


def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> Tensor:
    rendezvous.join()
    for number in range(UPDATES):
        change = update(pipeline, number)
        if sync.gradients is not None:
            sync.gradients.complete([change])
            (mean,) = sync.gradients.finish()
            assert mean is not None
            change = mean
        make_update(sync, parameter, number, change)
    rendezvous.pause(position=UPDATES)
    return parameter.detach().clone()


def exact(size: int) -> Tensor:
    """Where all methods lead that preserve means."""
    return start(0) + torch.stack([update(p, k) for p in range(size) for k in range(UPDATES)]).sum(0) / size


def tolerance(sync: Any, exchange: Exchange) -> float:
    """Of the error at the end, as a share of that of what training has moved by."""
    payload = exchange.payload
    if isinstance(sync, PartialReduce) and sync.decay is not None:
        return 0.9  # it does not keep the mean
    if isinstance(sync, DiLoCo) and sync.delay and exchange.overlap == "none":
        return 0.9  # what is trained while a mean travels is lost
    if isinstance(payload, OneBit):
        return 0.9  # of which a model that has not moved has 1
    common = isinstance(sync, AllReduce | LocalSGD | DiLoCo) or getattr(sync, "peers", "") == "ring"
    if isinstance(payload, Full) or not common:
        return 1e-4  # the mean over the workers stays where it is, whatever messages leave out
    sent = values(7, SIZE)
    payload.decode(payload.message(sent), received := torch.empty_like(sent))
    return min(0.9, max(0.01, 10 * float((received - sent).norm() / sent.norm())))


@pytest.mark.parametrize(("size", "sync", "exchange"), CASES, ids=str)
def test_what_is_not_refused_trains(
    stages: dict[int, Stage], size: int, sync: Any, exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ["a", "a", "b", "b"][:size]
    monkeypatch.setattr("lightning_sdpipe.sync.mover_choice.hosts_of_replicas", lambda groups, device: hosts)
    outcomes = stages[size].run(method_of(sync), exchange, start, train)
    expected, moved = exact(size), (exact(size) - start(0)).norm()
    for paused in outcomes:
        assert torch.equal(paused, outcomes[0]), "replicas differ after a pause"
        assert (paused - expected).norm() <= tolerance(sync, exchange) * moved


def test_refusals_say_what_to_use_and_are_no_broader_than_they_have_to_be() -> None:
    for (sync, exchange), reason in zip(PRODUCT, REASONS, strict=True):
        if reason is not None:
            assert reason.startswith(f"exchange={exchange} does not go with sync={sync}: ")
            assert any(does in reason.lower() for does in (" use ", ". leave ", ". average models with "))
    in_processes = {(type(sync), exchange.payload) for sync, exchange in WORKS if not in_threads(sync)}
    assert in_processes == {(PHDPSGD, Full())}


PINS = [
    (AllReduce(), Full(), 1_572_864),
    (AllReduce(), Half(), 786_432),
    (AllReduce(), EightBit(), 393_984),
    (AllReduce(), OneBit(), 49_536),
    (LocalSGD(every=1), OneBit(), 49_536),
    (SemiDecentralized(window=float("inf")), EightBit(), 393_984),
    (Decentralized("ring"), Full(), 2_097_152),
    (Decentralized("ring"), EightBit(), 525_312),
    (Decentralized("shift_one"), EightBit(), 262_656),
    (DiLoCo(every=2, momentum=0.0), EightBit(), 393_984 // 2),
]


@pytest.mark.parametrize(("sync", "payload", "sent"), PINS, ids=str)
def test_bytes_are_those_of_the_formula(stages: dict[int, Stage], sync: Any, payload: Payload, sent: int) -> None:
    """Of each worker in each update, for 2¹⁸ values; after the first, which tells groups how far apart models are."""

    def start(pipeline: int) -> Tensor:
        return torch.zeros(2**18)

    def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> list[int]:
        rendezvous.join()
        counts = []
        for number in range(4):
            change = 1e-3 * values(pipeline + 10 * number, 2**18)
            if sync.gradients is not None:
                sync.gradients.complete([change])
                sync.gradients.finish()
            make_update(sync, parameter, number, change)
            counts.append(sync.statistics.bytes_sent)
        rendezvous.pause(position=4)
        return counts

    for counts in stages[N].run(method_of(sync), Exchange(payload), start, train):
        assert counts[3] - counts[1] == 2 * sent
