"""A worker says that it is ready when nothing but its own computing can hold it up: with a late neighbour."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.pipeline.gradients import ReadySignal
from tests.patience import until
from tests.pipeline.harness import TRAIN
from tests.pipeline.test_exchange import Chain, Tied, assembled
from tests.workers import run_workers


def _train(rank: int, tied: bool, schedule: str, returned: Path) -> tuple[float, float]:
    """One mini-batch; when this rank was ready, and when its last gradient was computed. Stage 0 is late: it takes no
    gradients but two of four before the other stage has returned, or if that has to wait for it, is a little slow."""
    module = Tied() if tied else Chain()
    parts = assembled(module, schedule)
    stage = int(parts.runners[0].is_last)
    gradients: list[float] = []
    ready: list[float] = []

    def late(gradient: Tensor) -> None:
        if stage == 0 and tied:
            time.sleep(0.1)
        elif stage == 0 and len(gradients) == 2:
            until(returned.exists)  # else stage 1 waits for this one
        gradients.append(time.monotonic())

    module.net[1 + stage].weight.register_hook(late)
    signal = ReadySignal("backward", lambda: ready.append(time.monotonic()))
    signal.expect()
    loss = parts.pipeline.train(torch.ones(8, 3), TRAIN, 0, ready=signal)
    if stage == 1:
        returned.touch()
    loss.backward()
    dist.barrier()  # what was sent last may still be under way
    (when,) = ready
    return when, gradients[-1]


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_worker_neither_announces_late_nor_waits_for_its_neighbour_afterwards(tmp_path: Path, schedule: str) -> None:
    (ready, last), (_, neighbours_last) = run_workers(2, _train, False, schedule, tmp_path / "returned")
    assert ready < last < neighbours_last


@pytest.mark.distributed
def test_a_worker_that_shares_a_weight_waits_for_its_other_owner_first(tmp_path: Path) -> None:
    (ready, _), (_, neighbours_last) = run_workers(2, _train, True, "1f1b", tmp_path / "returned")
    assert ready > neighbours_last
