"""Group means over real processes: pieces that are never torn, and members that are lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange import moving
from lightning_sdpipe.exchange.moving import GroupMean, Scratch, finish
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.topology.groups import Replicas
from recipes.harness import processes
from tests.patience import limit
from tests.workers import run_workers


def group(members: Sequence[int], weights: Sequence[float], sequence: int = 0) -> Group:
    return Group(tuple(Worker(0, i) for i in members), tuple(weights), sequence, "tested")


def replicas(rank: int, timeout: float | None = None) -> Replicas:
    """Pipelines in the reverse order of the ranks, over a group of which torch.distributed has no name."""
    store = dist.PrefixStore("epoch 3", dist.distributed_c10d._get_default_store())
    size = dist.get_world_size()
    raw: Any = dist.ProcessGroupGloo(store, rank, size, limit())
    dist.barrier()  # a rank with nothing to exchange would close its connections while another still makes them
    if timeout:
        raw._set_default_timeout(timedelta(seconds=timeout))
    return Replicas(raw, range(size)[::-1], 0, size - 1 - rank)


def values(pipeline: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(10 * pipeline + size), dtype=torch.float32)


PIECE, PIECES = 1000, 5
WEIGHTS = (0.5, 0.3, 0.2)


def lose_a_member(rank: int, committed: int) -> tuple[Tensor, str, int]:
    """The second pipeline is killed when it has committed so many pieces, with the next one under way."""
    moving.PIECE = PIECE
    here, lent = replicas(rank), []

    class Watched(Scratch):
        def lend(self, length: int, like: Tensor) -> Tensor:
            lent.append(length)
            return super().lend(length, like)

    mover = GroupMean(here)
    mover._scratch = Watched()
    model = values(here.pipeline, PIECE * PIECES)
    pending = mover.start([model], group((0, 1, 2), WEIGHTS))
    store = dist.distributed_c10d._get_default_store()
    store.set(f"started/{rank}", "")
    if here.pipeline == 1:
        store.wait(["started/0", "started/2"])
        for _ in range(committed):
            pending.wait()
            pending.commit()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(WorkerFailedError) as failure:
        finish(pending)
    assert not pending.wait(), "what is dropped does not go on"
    processes.holds = False  # the other survivor, too, shall hear of it, and not wait for its limit
    return model, str(failure.value), max(lent)


@pytest.mark.distributed
@pytest.mark.parametrize("committed", [0, 2])
def test_a_member_lost_in_the_middle_tears_no_piece(committed: int) -> None:
    outcomes = run_workers(3, lose_a_member, committed, lost={1})
    own = [values(p, PIECE * PIECES) for p in range(3)]
    mean = sum(w * v for w, v in zip(WEIGHTS, own, strict=True))
    for pipeline, outcome in ((0, outcomes[2]), (2, outcomes[0])):
        model, message, scratch = outcome
        assert "pipeline" in message
        assert scratch <= PIECE + 3, "more memory than a piece"
        for number, piece in enumerate(model.split(PIECE)):
            whole = slice(number * PIECE, (number + 1) * PIECE)
            if number <= committed and not torch.equal(piece, own[pipeline][whole]):
                torch.testing.assert_close(piece, mean[whole])  # type: ignore[index]
            else:
                assert number >= committed, "it was committed by the other one, so all had it"
                assert torch.equal(piece, own[pipeline][whole])


def abort(rank: int) -> list[Tensor]:
    """After one piece of three; and the next group goes as if nothing had been."""
    moving.PIECE = PIECE
    here = replicas(rank)
    mover, model = GroupMean(here), values(here.pipeline, 3 * PIECE)
    pending = mover.start([model], group((0, 1), (0.25, 0.75), 1))
    assert pending.wait()
    before = model.clone()
    pending.commit()
    pending.wait()
    pending.abort()
    assert not pending.wait()
    dropped = model.clone()
    finish(mover.start([model], group((0, 1), (0.25, 0.75), 2)))
    return [before, dropped, model]


@pytest.mark.distributed
def test_nothing_changes_before_a_commit_nor_after_an_abort() -> None:
    for pipeline, (before, dropped, again) in enumerate(run_workers(2, abort)[::-1]):
        own = values(pipeline, 3 * PIECE)
        mean = 0.25 * values(0, 3 * PIECE) + 0.75 * values(1, 3 * PIECE)
        assert torch.equal(before, own)
        torch.testing.assert_close(dropped[:PIECE], mean[:PIECE])
        assert torch.equal(dropped[PIECE:], own[PIECE:])
        torch.testing.assert_close(again, mean)


def wait_for_another(rank: int) -> str:
    here = replicas(rank, timeout=0.5)
    if rank == 0:
        with pytest.raises(WorkerFailedError) as failure:
            finish(GroupMean(here).start([values(rank, 5)], group((0, 1), (0.5, 0.5), 7)))
        return str(failure.value)
    return ""


@pytest.mark.distributed
def test_a_member_that_does_not_come_is_named() -> None:
    message, _ = run_workers(2, wait_for_another)
    assert message.startswith("exchanging with pipeline 0 of stage 0 failed: ")


def test_neighbours_are_refused_rather_than_ignored() -> None:
    workers = tuple(Worker(0, i) for i in range(3))
    ring = Group(workers, (1 / 3,) * 3, 0, "ring", neighbours=(workers[1:], workers[:1], workers[:1]))
    with pytest.raises(ConfigurationError, match=r"group 0 gives its members neighbours of their own \(ring\)"):
        GroupMean(Replicas(None, range(3), 0, 0)).start([], ring)  # type: ignore[arg-type]
