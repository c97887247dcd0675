"""Averages beside training, at their own pace, on a real process that is killed in one and comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_sdpipe.exchange.moving import GroupMean, Pending
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.sync import LocalSGD
from tests.worker.elastic.jobs import SAMPLES, elastic_run, fit

pytestmark = pytest.mark.distributed


def kill_in_average(number: int) -> None:
    """Ends this process in that average, when it has begun to send."""
    start, seen = GroupMean.start, [0]

    def starts(mover: GroupMean, tensors: Sequence[Tensor], group: Group) -> Pending:
        pending = start(mover, tensors, group)
        seen[0] += not str(group.reason).startswith("pause")
        if seen[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return pending

    GroupMean.start = starts  # type: ignore[method-assign]


def train(directory: Path, options: dict[str, Any], dies_in: int = 0) -> None:
    if dies_in and os.environ["RANK"] == "0":
        kill_in_average(dies_in)
    fit(directory, SAMPLES, options)


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_is_killed_in_an_average_and_the_others_go_on_without_a_pause(tmp_path: Path, num_stages: int) -> None:
    exchange = Exchange(overlap="free", interval=0.02)
    work = partial(train, tmp_path, {"sync": LocalSGD(every=1), "exchange": exchange, "num_stages": num_stages})
    with elastic_run(tmp_path, num_stages, 3) as run:
        killed = run.lose_and_regain(partial(work, dies_in=10), work)
        run.wait(lambda: max(row.get("others", 0) for row in run.rows(2)[-1]) > 2, "averages of the newcomer with both")
        run.finish_well(sync=LocalSGD(every=1))
        run.check_samples()
        run.check_turns([0, 1], killed)
        assert run.rows(2)[-1][0]["started"] > 0
