"""Means over all replicas, and taking over the model of one."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe import p2p
from lightning_sdpipe.exchange import moving
from lightning_sdpipe.exchange.collectives import SumInPlace, average_all, take_over
from lightning_sdpipe.exchange.moving import finish
from lightning_sdpipe.topology.groups import Replicas
from tests.exchange.test_group_mean import group, values
from tests.workers import run_workers

WEIGHTS = (0.5, 0.2, 0.3)


def collect(rank: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    moving.PIECE = 30
    here = Replicas(dist.group.WORLD, range(3)[::-1], 0, 2 - rank)  # type: ignore[arg-type]
    mean = [values(here.pipeline, 100), torch.tensor(here.pipeline), values(here.pipeline, 6).view(2, 3).half()]
    average_all(mean, here, WEIGHTS)
    copied = [values(here.pipeline, 100), torch.tensor(here.pipeline)]
    take_over(copied, here, 1)
    sums, before = [values(here.pipeline, 100), values(here.pipeline, 6).double()], here.traffic.bytes
    finish(SumInPlace(here).start(sums, group(range(3), (1.0,) * 3)))
    assert here.traffic.bytes - before == 4 * (100 * 4 + 6 * 8) // 3
    if here.pipeline != 1:
        finish(SumInPlace(here).start(sums[:1], group((0, 2), (1.0,) * 2)))
    return mean, copied, sums


class Late(dist.Work):
    """Succeeds when a wait for it has just run out of time."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if timeout:
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return True


def test_a_sum_that_is_there_just_after_its_time_has_not_failed() -> None:
    here = Replicas(None, range(2), 0, 0, connections=p2p.Connections())  # type: ignore[arg-type]
    SumInPlace(here).wait(Late())


@pytest.mark.distributed
def test_means_counters_and_a_model_that_others_take_over() -> None:
    outcomes = run_workers(3, collect)
    for pipeline, (mean, copied, sums) in zip((2, 1, 0), outcomes, strict=True):
        torch.testing.assert_close(mean[0], sum(w * values(p, 100) for p, w in enumerate(WEIGHTS)))
        expected = sum(w * values(p, 6).half().float() for p, w in enumerate(WEIGHTS)).view(2, 3)  # type: ignore[union-attr]
        torch.testing.assert_close(mean[2].float(), expected, rtol=2e-3, atol=2e-3)
        assert int(mean[1]) == 2, "the largest"
        assert torch.equal(copied[0], values(1, 100))
        assert int(copied[1]) == 1
        assert all(torch.equal(a, b) for a, b in zip(mean, outcomes[0][0], strict=True))
        total = sum(values(p, 100) for p in range(3))
        torch.testing.assert_close(sums[0], total if pipeline == 1 else 2 * total)
        torch.testing.assert_close(sums[1], sum(values(p, 6).double() for p in range(3)))
