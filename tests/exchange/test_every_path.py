"""A weighted mean is one on every path that a mover or a round has for it: groups of one, of two and of all, one host
and several, pieces and messages without values, members that have nothing to add."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.exchange.background import Overlapped
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.encoded_rounds import EncodedRounds
from lightning_sdpipe.exchange.gradient_rounds import GradientRounds
from lightning_sdpipe.exchange.moving import GroupMean, Mover, PairMean, finish
from lightning_sdpipe.exchange.outer_model import OuterModel
from lightning_sdpipe.exchange.payloads import Full, OneBit, Payload
from lightning_sdpipe.exchange.references import CommonReference, OwnReference
from lightning_sdpipe.topology.groups import Replicas
from tests.exchange.test_group_mean import group, values
from tests.exchange.threads import Crew, together

pytestmark = pytest.mark.usefixtures("short_pieces")
PIECE, HALVED = 300, 150
SIZES = (0, 1, 2, 5, 400)
HOSTS = (None, "aaaa", "aabb", "abaa", "abcd")
GROUPS: Sequence[tuple[tuple[int, ...], tuple[float, ...]]] = [
    ((2,), (1.0,)),
    ((0, 3), (0.25, 0.75)),
    ((0, 1, 3), (0.5, 0.2, 0.3)),
    ((0, 1, 2, 3), (0.1, 0.4, 0.3, 0.2)),
    ((0, 1, 2, 3), (0.0, 0.0, 1.0, 0.0)),
]
Make = Callable[[Replicas, Sequence[str] | None, Sequence[Tensor]], Mover]


def outer(here: Replicas, hosts: Sequence[str] | None, start: Sequence[Tensor]) -> Mover:
    coding = OuterModel(Full(), here.pipeline)
    coding.begin([torch.ones_like(tensor) for tensor in start])
    return EncodedMean(here, coding, hosts)


WITHOUT_HOSTS: dict[str, tuple[Make, Callable[[Sequence[int]], bool]]] = {
    "GroupMean": (lambda here, hosts, start: GroupMean(here), lambda members: True),
    "PairMean": (lambda here, hosts, start: PairMean(here, threading.Lock()), lambda members: len(members) == 2),
}
WITH_HOSTS: dict[str, Make] = {
    "OwnReference": lambda here, hosts, start: EncodedMean(here, OwnReference(Full()), hosts),
    "CommonReference": lambda here, hosts, start: EncodedMean(here, CommonReference(Full(), 0), hosts),
    "OuterModel": outer,
}
CASES = [
    *((name, make, None, takes, late) for name, (make, takes) in WITHOUT_HOSTS.items() for late in (False, True)),
    *(
        (name, make, hosts, lambda members: True, hosts == "aabb")
        for name, make in WITH_HOSTS.items()
        for hosts in HOSTS
    ),
]


@pytest.fixture(scope="module")
def crews() -> dict[int, tuple[Crew, Crew]]:
    return {size: (Crew(size), Crew(size)) for size in (1, 2, 4)}


def models(pipeline: int) -> list[Tensor]:
    return [values(pipeline, size) for size in SIZES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}-{case[4]}")
def test_movers_give_each_member_the_weighted_mean(
    crews: dict[int, tuple[Crew, Crew]],
    case: tuple[str, Make, Sequence[str] | None, Callable[[Sequence[int]], bool], bool],
) -> None:
    _, make, hosts, takes, late = case
    found = [(members, weights) for members, weights in GROUPS if takes(members)]

    def work(rank: int) -> list[list[Tensor]]:
        outcomes = []
        for number, (members, weights) in enumerate(found):
            tensors, here = models(rank), crews[4][0].replicas(rank)
            mover, decided = make(here, hosts, tensors), group(members, weights, number)
            if rank in members and not late:
                finish(mover.start(tensors, decided))
            elif rank in members:
                exchange = Overlapped(mover, 20.0)
                exchange.begin(tensors, decided)
                torch._foreach_add_(tensors, 1.0)  # what is trained meanwhile
                exchange.end()
                torch._foreach_sub_(tensors, 1.0)
            outcomes.append(tensors)
        return outcomes

    by_rank = together(4, work)
    for rank, outcomes in enumerate(by_rank):
        for (members, weights), tensors in zip(found, outcomes, strict=True):
            own = {rank: 1.0} if rank not in members else dict(zip(members, weights, strict=True))
            for index, tensor in enumerate(tensors):
                mean = sum(weight * models(pipeline)[index].double() for pipeline, weight in own.items())
                torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=1e-5, msg=f"{members} {weights}")
    if case[0] == "GroupMean" and not late:
        for number, (members, _) in enumerate(found):
            for index in range(len(SIZES)):
                equal = {by_rank[rank][number][index].numpy().tobytes() for rank in members}
                assert len(equal) == 1, "replicas would drift apart"


SHAPES = [(3,), (0,), (2, 60), (1,)]
Rounds = Callable[[list[nn.Parameter], Replicas, Replicas, Sequence[str] | None], GradientRounds]


def mover(beside: Replicas, payload: Payload, hosts: Sequence[str] | None) -> EncodedMean:
    return EncodedMean(beside, CommonReference(payload, beside.pipeline), hosts)


def encoded(
    parameters: list[nn.Parameter], here: Replicas, beside: Replicas, hosts: Sequence[str] | None
) -> GradientRounds:
    return EncodedRounds(parameters, here, mover(beside, Full(), hosts), 300, True, 20.0, lambda: 1.0)


def with_momentum(
    parameters: list[nn.Parameter], here: Replicas, beside: Replicas, hosts: Sequence[str] | None
) -> GradientRounds:
    payload = OneBit(block=64, momentum=0.5, after=100)  # full precision so far
    return EncodedRounds(parameters, here, mover(beside, payload, hosts), 300, True, 20.0, lambda: 1.0)


def gradient(pipeline: int, number: int) -> Tensor:
    return values(10 * pipeline + number, int(torch.tensor(SHAPES[number]).prod())).view(SHAPES[number])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("make", "hosts"),
    [
        (lambda parameters, here, beside, hosts: GradientRounds(parameters, here, 300), None),
        *((make, hosts) for make in (encoded, with_momentum) for hosts in HOSTS),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_rounds_give_the_mean_over_those_that_train(
    crews: dict[int, tuple[Crew, Crew]], make: Rounds, hosts: str | None, size: int
) -> None:
    train = [tuple(range(size)), (0,), (size - 1,), tuple(range(max(1, size - 1)))]

    def work(rank: int) -> list[list[Tensor | None]]:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        here, beside = (crew.replicas(rank) for crew in crews[size])
        rounds = make(parameters, here, beside, None if hosts is None else hosts[:size])
        outcomes = []
        for there in train:
            mine = [gradient(rank, number) if rank in there else None for number in range(3)]
            rounds.complete([*mine, None], trains=rank in there)
            outcomes.append(rounds.wait().gradients)
        return outcomes

    for outcomes in together(size, work):
        for there, gradients in zip(train, outcomes, strict=True):
            assert gradients[3] is None, "no member used it"
            for number, found in enumerate(gradients[:3]):
                mean = torch.stack([gradient(pipeline, number) for pipeline in there]).mean(0)
                assert found is not None
                torch.testing.assert_close(found, mean, rtol=1e-5, atol=1e-5, msg=f"{there} {number}")
