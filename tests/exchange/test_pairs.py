"""Two workers average what goes on changing meanwhile."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange import moving
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import Mover, PairMean, exchange_whole
from lightning_sdpipe.exchange.payloads import EightBit
from lightning_sdpipe.exchange.references import OwnReference
from lightning_sdpipe.topology.groups import Replicas
from tests.exchange.test_group_mean import group, values
from tests.exchange.threads import Crew, together
from tests.workers import run_workers


def average(rank: int, weights: tuple[float, float]) -> Tensor:
    """Its own updates come between the copy of a piece and its commit."""
    moving.PIECE = 40
    published = values(rank, 100)
    mover = PairMean(Replicas(dist.group.WORLD, range(2), 0, rank), threading.Lock())  # type: ignore[arg-type]
    pending = mover.start([published], group((0, 1), weights))
    while pending.wait():
        published.add_(rank + 1.0)
        pending.commit()
    return published


@pytest.mark.distributed
@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.25, 0.75)])
def test_no_update_is_lost_and_equal_weights_keep_the_sum(weights: tuple[float, float]) -> None:
    first, second = run_workers(2, average, weights)
    steps = torch.arange(100) // 40  # a piece has had as many updates when its copy was taken
    models = [values(rank, 100) + (rank + 1.0) * steps for rank in range(2)]
    updates = [(rank + 1.0) * (3 - steps) for rank in range(2)]
    mean = weights[0] * models[0] + weights[1] * models[1]
    torch.testing.assert_close(first, mean + updates[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second, mean + updates[1], rtol=1e-5, atol=1e-5)
    if weights[0] == weights[1]:
        torch.testing.assert_close(first + second, values(0, 100) + values(1, 100) + 9.0)


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("dies_after", [1, 3, None])
def test_both_change_when_both_have_all_of_it_and_else_nothing_changes(
    eight_bits: bool, dies_after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one ends after a piece, or before it has said that it has all of them."""
    monkeypatch.setattr(moving, "PIECE", 64)
    crew = Crew(2)

    def work(rank: int) -> Tensor:
        replicas, lock, published = crew.replicas(rank), threading.Lock(), values(rank, 192)
        mover: Mover = PairMean(replicas, lock)
        if eight_bits:
            mover = EncodedMean(replicas, OwnReference(EightBit()), lock=lock)
        pending = mover.start([published], group((0, 1), (0.5, 0.5)))
        if rank == 1 and dies_after is not None:
            for _ in range(dies_after):
                assert pending.wait()
            with pytest.raises(RuntimeError):
                crew.groups[rank].recv([torch.zeros(1)], 0, 7).wait(timedelta(milliseconds=1))
        elif dies_after is None:
            exchange_whole(pending, group((0, 1), (0.5, 0.5)), replicas)
        else:
            with pytest.raises(WorkerFailedError, match="pipeline 1"):
                exchange_whole(pending, group((0, 1), (0.5, 0.5)), replicas)
        return published

    first, second = together(2, work)
    mean = (values(0, 192) + values(1, 192)) / 2
    if dies_after is None:
        torch.testing.assert_close(torch.stack([first, second]), torch.stack([mean, mean]))  # at first in full
    else:
        assert torch.equal(first, values(0, 192))
        assert torch.equal(second, values(1, 192))
