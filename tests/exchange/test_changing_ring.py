"""Rings whose members come, go and break off: whatever happened before, an exchange is one of copies that are equal."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.moving import finish
from lightning_sdpipe.exchange.payloads import EightBit, Half, Payload
from lightning_sdpipe.exchange.ring_mean import RingCopies, RingMean, weight_of_each
from lightning_sdpipe.meter import Traffic
from lightning_sdpipe.policies import Group
from lightning_sdpipe.policies.decentralized import as_ring
from tests.exchange.test_group_mean import group, values
from tests.exchange.threads import Crew, together

pytestmark = pytest.mark.usefixtures("short_pieces")
N, PIECE, SIZE = 4, 300, 1000


class Workers:
    """N workers with their models and copies; unless they come and go, all begin with one model."""

    def __init__(self, crew: Crew, payload: Payload | None, changes: bool = True) -> None:
        self.crew, self.number = crew, 0
        self.models = [values(rank if changes else 0, SIZE) for rank in range(N)]
        self.copies = [RingCopies(payload, rank, changes) for rank in range(N)]
        for model, copies in zip(self.models, self.copies, strict=True):
            if not changes:
                copies.begin([model])
        self.traffic = [Traffic() for _ in range(N)]

    def exchange(self, members: Sequence[int], breaks: int | None = None) -> list[int]:
        """Averages among ``members``; one of them breaks off when it has sent all, and has not taken the last piece
        over. Returns the bytes that each sent."""
        self.number += 1
        ring = as_ring(group(members, [1 / len(members)] * len(members), self.number))
        before = [traffic.bytes for traffic in self.traffic]

        def work(rank: int) -> None:
            if rank not in members:
                return
            replicas = self.crew.replicas(rank)
            object.__setattr__(replicas, "traffic", self.traffic[rank])
            pending = RingMean(replicas, self.copies[rank]).start([self.models[rank]], ring)
            pieces = 0
            while pending.wait():
                pieces += 1
                if rank == breaks and pieces * PIECE >= SIZE:
                    pending.abort()
                    return
                pending.commit()

        together(N, work)
        return [traffic.bytes - sent for traffic, sent in zip(self.traffic, before, strict=True)]

    def check_copies(self, members: Sequence[int]) -> None:
        """What two neighbours have of one is the same, bit for bit, and is its model."""
        for rank in members:
            for number, copies in enumerate(self.copies[rank].of_pieces):
                assert torch.equal(copies.own, self.models[rank][number * PIECE : (number + 1) * PIECE])
                for other, copy in copies.neighbours.items():
                    assert torch.equal(copy, self.copies[other].of_pieces[number].own), (rank, other)


def averaged(models: Sequence[Tensor], members: Sequence[int]) -> list[Tensor]:
    size, found = len(members), []
    for place in range(size):
        beside = {(place - 1) % size, (place + 1) % size} - {place}
        own = models[members[place]]
        found.append(own + weight_of_each(size) * sum((models[members[i]] - own for i in beside), torch.zeros(())))
    return found


@pytest.mark.parametrize("members", [(0, 1, 2, 3), (0, 2, 3), (1, 3)])
@pytest.mark.parametrize("payload", [None, EightBit(64)], ids=str)
def test_members_average_with_both_neighbours_as_many_as_they_are(
    crew: Crew, members: Sequence[int], payload: Payload | None
) -> None:
    workers = Workers(crew, payload)
    expected = averaged(workers.models, members)
    workers.exchange(members)
    for rank, mean in zip(members, expected, strict=True):
        torch.testing.assert_close(workers.models[rank], mean, rtol=0, atol=1e-6 if payload is None else 0.03)


@settings(max_examples=15, deadline=None)
@given(
    payload=st.sampled_from([EightBit(64), EightBit(64, feedback=True), Half()]),
    history=st.lists(
        st.tuples(st.sets(st.integers(0, N - 1), min_size=2), st.integers(0, 2 * N), st.booleans()), max_size=8
    ),
)
def test_whatever_happened_copies_are_equal_and_the_mean_stays(
    crew: Crew, payload: Payload, history: Sequence[tuple[set[int], int, bool]]
) -> None:
    workers = Workers(crew, payload)
    for members, breaks, forgets in history:
        there = sorted(members)
        if forgets:
            workers.copies[there[0]].forget()
        for rank in there:
            workers.models[rank].add_(0.1 * values(rank + 10 * workers.number, SIZE))
        before = torch.stack([workers.models[rank] for rank in there]).mean(0)
        workers.exchange(there, breaks)
        if breaks in there:
            continue
        workers.check_copies(there)
        after = torch.stack([workers.models[rank] for rank in there]).mean(0)
        residual = torch.stack([_residual(workers.copies[rank]) for rank in there]).mean(0)
        assert (after - before).abs().max() < 0.1 + 2 * residual.abs().max()


def _residual(copies: RingCopies) -> Tensor:
    return torch.cat([feedback.residual for feedback in copies.residuals] or [torch.zeros(SIZE)])


def test_only_what_is_new_to_a_neighbour_travels_in_full(crew: Crew) -> None:
    workers, everybody = Workers(crew, EightBit(64)), range(N)
    message = sum(EightBit(64).nbytes(min(PIECE, SIZE - start)) for start in range(0, SIZE, PIECE)) + 8
    in_full = 4 * SIZE
    assert workers.exchange(everybody) == [2 * (in_full + message)] * N
    assert workers.exchange(everybody) == [2 * message] * N
    own = workers.copies[0].of_pieces[0].own
    assert workers.exchange([0, 1, 3]) == [2 * message, 2 * message + in_full, 0, 2 * message + in_full], "2 has gone"
    assert workers.copies[0].of_pieces[0].own is own, "both of its neighbours know it"
    sent = workers.exchange(everybody)
    assert sent == [2 * message, 2 * message + in_full, 2 * (message + in_full), 2 * message + in_full], "2 is back"
    workers.exchange(everybody, breaks=1)
    sent = workers.exchange(everybody)
    assert sent == [2 * message + in_full, 2 * (message + in_full), 2 * message + in_full, 2 * message]


def test_members_that_stay_compare_nothing_and_a_ring_that_closes_sends_in_full_there(crew: Crew) -> None:
    workers = Workers(crew, EightBit(64), changes=False)
    message = sum(EightBit(64).nbytes(min(PIECE, SIZE - start)) for start in range(0, SIZE, PIECE))
    for members, in_full in (
        ((0, 1, 2, 3), ()),
        ((0, 1, 2, 3), ()),
        ((0, 1, 3), (1, 3)),
        ((0, 1, 3), ()),
        ((0, 3), ()),
    ):
        for rank in members:
            workers.models[rank].add_(0.1 * values(rank + 10 * workers.number, SIZE))
        expected = averaged(workers.models, members)
        beside = 1 if len(members) == 2 else 2
        sent = [beside * message + (4 * SIZE if rank in in_full else 0) for rank in members]
        found = workers.exchange(members)
        assert [found[rank] for rank in members] == sent
        workers.check_copies(members)
        for rank, mean in zip(members, expected, strict=True):  # by neighbours as they were before their step
            assert (workers.models[rank] - mean).abs().max() < 0.6


def test_models_in_a_changing_ring_become_one(crew: Crew) -> None:
    workers = Workers(crew, EightBit(64))
    for number in range(40):
        members = [i for i in range(N) if i != number // 5 % 8]
        workers.exchange(members, breaks=1 if number == 12 else None)
    apart = max(float((model - workers.models[0]).abs().max()) for model in workers.models)
    assert apart < 1e-2


def test_a_group_without_neighbours_is_refused_and_one_alone_is_not(crew: Crew) -> None:
    mover = RingMean(crew.replicas(0), RingCopies(EightBit(), 0, changes=True))
    with pytest.raises(ConfigurationError, match="names no neighbours"):
        mover.start([values(0, SIZE)], group([0, 1], [0.5, 0.5], 1))
    model = values(0, SIZE)
    alone: Group = as_ring(group([0], [1.0], 1))
    finish(mover.start([model], alone))
    assert torch.allclose(model, values(0, SIZE), atol=1e-3)
