"""When a worker says that it is ready, and what that is worth."""

from __future__ import annotations

import pytest

from lightning_sdpipe.heterogeneity import Static
from lightning_sdpipe.policies import announcing
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.simulate import Work, pipelines, simulate
from tests.policies.scripted import jittered


@pytest.mark.parametrize(("micro_batches", "share"), [(1, 0.75), (2, 0.5), (4, 0.0), (16, 0.0)])
def test_a_sixth_of_a_mini_batch_is_left(micro_batches: int, share: float) -> None:
    assert announcing.share_before(micro_batches) == share


@pytest.mark.parametrize(("factors", "least"), [([1.0, 1.0, 1.0, 2.0], 0.96), ([1.0, 1.0, 2.0, 4.0], 0.88)])
def test_fast_devices_do_not_wait_for_the_backward_of_slow_ones(
    factors: list[float], least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(1, 4, 200, jittered(1.0, 0.02), heterogeneity=Static(tuple(factors)))
    alone = sum(simulate(NoSync(), work).rates(30))
    ours = sum(simulate(SemiDecentralized(), work).rates(30))
    monkeypatch.setattr(pipelines, "share_before", lambda _: 0.0)
    as_in_the_paper = sum(simulate(SemiDecentralized(), work).rates(30))
    assert ours / alone >= least
    assert as_in_the_paper < ours
