"""Exchanges that break off in the middle: no piece is torn, and what was remembered is right, or gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import LOST_CONNECTION, WorkerFailedError
from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.background import Overlapped
from lightning_sdpipe.exchange.collectives import SumInPlace
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import finish
from lightning_sdpipe.exchange.outer_model import Nesterov, OuterModel
from lightning_sdpipe.exchange.payloads import EightBit, OneBit
from lightning_sdpipe.exchange.references import CommonReference, OwnReference
from lightning_sdpipe.exchange.ring_mean import RingCopies, RingMean
from lightning_sdpipe.policies import Group
from lightning_sdpipe.policies.decentralized import as_ring
from lightning_sdpipe.topology.groups import Replicas
from tests import relay
from tests.exchange.test_group_mean import group, values
from tests.exchange.threads import Crew, together
from tests.patience import limit

pytestmark = pytest.mark.usefixtures("short_pieces")
N, PIECE, SIZE = 3, 300, 1000


@pytest.fixture
def break_off(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """From the given call of each worker on, nobody reaches anybody; None mends everything."""
    calls: dict[int, int] = {}
    limit: list[int | None] = [None]
    begin = transfers.begin

    def failing(outgoing: Any, into: Any, replicas: Replicas, tag: int) -> transfers.Transfers:
        calls[replicas.pipeline] = calls.get(replicas.pipeline, 0) + 1
        if limit[0] is not None and calls[replicas.pipeline] > limit[0]:
            raise WorkerFailedError("exchanging with pipeline 2 of stage 0 failed: it was lost")
        return begin(outgoing, into, replicas, tag)

    def set_limit(last: int | None) -> None:
        calls.clear()
        limit[0] = last

    monkeypatch.setattr(transfers, "begin", failing)
    return set_limit


def everybody(number: int) -> Group:
    return group(range(N), [1 / N] * N, number)


def start(rank: int) -> Tensor:
    return 10 * values(99, SIZE)


@pytest.mark.parametrize("last", [0, 1, 2, 5])
def test_pieces_of_groups_are_whole_and_the_next_exchange_goes_on(
    crew: Crew, break_off: Callable[[int | None], None], last: int
) -> None:
    codings = [OwnReference(EightBit(block=64)) for _ in range(N)]
    models = [start(rank) + values(rank, SIZE) for rank in range(N)]
    movers = [EncodedMean(crew.replicas(rank), codings[rank]) for rank in range(N)]
    together(N, lambda rank: finish(movers[rank].start([models[rank]], everybody(1))))
    for rank, model in enumerate(models):
        model.add_(0.1 * values(rank + 10, SIZE))
    before, mean = [model.clone() for model in models], torch.stack(models).mean(0)
    break_off(last)

    def fail(rank: int) -> None:
        with pytest.raises(WorkerFailedError, match="it was lost"):
            finish(movers[rank].start([models[rank]], everybody(2)))

    together(N, fail)
    done = last // 2 * PIECE  # two messages each way
    for rank, model in enumerate(models):
        assert torch.equal(model[done:], before[rank][done:])
        assert done == 0 or not torch.equal(model[:done], before[rank][:done])
    break_off(None)
    together(N, lambda rank: finish(movers[rank].start([models[rank]], everybody(3))))
    torch.testing.assert_close(torch.stack(models).mean(0), mean, rtol=1e-6, atol=1e-5)


def test_gradients_forget_what_was_left_out(crew: Crew, break_off: Callable[[int | None], None]) -> None:
    """All of them, since parts of it may have been sent: and means stay equal on all."""
    codings = [CommonReference(OneBit(block=64), rank) for rank in range(N)]
    movers = [EncodedMean(crew.replicas(rank), codings[rank]) for rank in range(N)]
    together(N, lambda rank: finish(movers[rank].start([values(rank, SIZE)], everybody(1))))
    assert all(coding._residuals for coding in codings)
    break_off(1)

    def fail(rank: int) -> None:
        with pytest.raises(WorkerFailedError):
            finish(movers[rank].start([values(rank, SIZE)], everybody(2)))

    together(N, fail)
    assert not any(coding._residuals for coding in codings)
    break_off(None)
    gradients = [values(rank, SIZE) for rank in range(N)]
    together(N, lambda rank: finish(movers[rank].start([gradients[rank]], everybody(3))))
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: OuterModel(EightBit(), rank),
        lambda rank: OuterModel(EightBit(), rank, Nesterov(0.7, 0.9), 0.0),
        lambda rank: RingCopies(EightBit(), rank),
    ],
)
def test_what_is_not_common_any_more_is_not_used(
    crew: Crew, break_off: Callable[[int | None], None], make: Callable[[int], OuterModel | RingCopies]
) -> None:
    models, states = [start(rank) for rank in range(N)], [make(rank) for rank in range(N)]
    for model, state in zip(models, states, strict=True):
        state.begin([model])

    def exchange(rank: int, number: int) -> None:
        state, replicas, group = states[rank], crew.replicas(rank), everybody(number)
        if isinstance(state, RingCopies):
            finish(RingMean(replicas, state).start([models[rank]], as_ring(group)))
        else:
            finish(EncodedMean(replicas, state).start([models[rank]], group))

    together(N, lambda rank: exchange(rank, 1))
    break_off(1)

    def fail(rank: int) -> None:
        with pytest.raises(WorkerFailedError, match="it was lost"):
            exchange(rank, 2)
        with pytest.raises(WorkerFailedError, match="all replicas must be made equal first"):
            exchange(rank, 3)

    together(N, fail)
    break_off(None)
    for rank in range(N):
        models[rank].copy_(start(0))
        states[rank].begin([models[rank]])
    together(N, lambda rank: exchange(rank, 4))
    for model in models:
        torch.testing.assert_close(model, start(0))


def test_a_late_mean_that_breaks_off_changes_nothing(crew: Crew, break_off: Callable[[int | None], None]) -> None:
    def fail(rank: int) -> None:
        model = start(rank) + values(rank, SIZE)
        late = Overlapped(EncodedMean(crew.replicas(rank), OwnReference(EightBit(block=64))), 20)
        late.begin([model], everybody(1))
        model.add_(1.0)
        before = model.clone()
        with pytest.raises(WorkerFailedError, match="it was lost"):
            late.end()
        assert torch.equal(model, before)
        assert late.end() == 0.0, "it is over"

    break_off(3)
    together(N, fail)


LONG = 2**25
"""Values: a message that takes some 50 ms between two processes of one machine."""


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_wait_ends_on_both_sides_if_the_connection_is_lost_in_the_midst_of_a_message(is_given_up: bool) -> None:
    """gloo itself would go on waiting until the timeout."""
    connections = p2p.Connections()
    if is_given_up:
        connections.given_up.set()

    with relay.lost_after(10**6, sender=1) as groups:

        def move(rank: int) -> None:
            mine = Replicas(groups[rank], range(2), 0, rank, limit=limit(), connections=connections)
            outgoing, into = {0: torch.ones(2**23)}, {1: torch.zeros(2**23)}
            under_way = transfers.begin(outgoing if rank else {}, {} if rank else into, mine, 7)
            while not rank and not into[1][0]:
                time.sleep(0.001)
            reason = "the process group is given up" if is_given_up else LOST_CONNECTION
            with pytest.raises(WorkerFailedError, match=f"pipeline {1 - rank} of stage 0 was broken off: .*{reason}"):
                under_way.wait()
            assert not into[1][-1], "it is amid the message"

        start = time.monotonic()
        together(2, move)
        assert time.monotonic() - start < limit().total_seconds() / 2


def test_a_sum_ends_if_the_connection_is_lost_amid_its_last_message() -> None:
    """gloo itself would go on waiting until the timeout, on either side, and so would the destructor of the group."""
    connections, start = p2p.Connections(), time.monotonic()
    with relay.lost_after(3_900_000, sender=1) as groups:
        gives_up = threading.Timer(1.0, connections.given_up.set)
        gives_up.start()

        def add_up(rank: int) -> None:
            mover = SumInPlace(Replicas(groups[rank], range(2), 0, rank, connections=connections))
            pending = mover.start([torch.ones(10**6)], group(range(2), (1.0, 1.0)))
            if rank:
                with suppress(WorkerFailedError):  # all that it waits for may have come
                    pending.wait()
                return
            with pytest.raises(WorkerFailedError, match=r"adding up with .* failed: "):  # gloo may notice first
                pending.wait()

        together(2, add_up)
        gives_up.join()
    assert time.monotonic() - start < limit().total_seconds() / 2


def test_threads_that_wait_for_long_messages_wait_again_and_one_that_is_left_alone_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new one for each message would have to find a processor each time."""
    made: list[str] = []
    start = threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        if thread.name == "long messages":
            made.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    crew, broken = Crew(2), Crew(2)

    def replicas(crew: Crew, rank: int, connections: p2p.Connections) -> Replicas:
        return replace(crew.replicas(rank), connections=connections)

    def work(rank: int) -> Tensor:
        into = torch.empty(LONG)
        for number in range(3):
            outgoing = {1 - rank: torch.full((LONG,), float(number + rank))}
            transfers.begin(outgoing, {1 - rank: into}, replicas(crew, rank, p2p.Connections()), number).wait()
        return into

    assert [into[-1] for into in together(2, work)] == [3.0, 2.0]
    assert len(made) <= 2
    given_up = p2p.Connections()
    given_up.given_up.set()
    for number in range(3):
        with pytest.raises(WorkerFailedError, match="given up"):
            transfers.begin({}, {1: torch.empty(LONG)}, replicas(broken, 0, given_up), number).wait()
    together(2, work)
    assert len(made) <= 5


def test_long_messages_may_take_any_time_as_long_as_bytes_move(monkeypatch: pytest.MonkeyPatch) -> None:
    crew, connections, moved = Crew(2), p2p.Connections(), iter([1, 2, 3])
    monkeypatch.setattr(transfers, "_LOOKS", 1)
    monkeypatch.setattr(connections, "moved", lambda: next(moved, 3))
    silent = replace(crew.replicas(0), limit=timedelta(seconds=0.01), connections=connections)
    with pytest.raises(WorkerFailedError, match=r"was broken off: no byte has come or gone for 0\.01"):
        transfers.begin({}, {1: torch.empty(LONG)}, silent, 0).wait()
    assert not list(moved), "it was not broken off while they did"
