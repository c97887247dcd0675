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
from tests.patience import limit
from tests.worker.elastic.jobs import elastic_run, fit
from tests.worker.elastic.test_runs import SAMPLES, check_that_nothing_is_lost, check_that_replicas_were_equal

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
    with elastic_run(tmp_path, num_stages, 3, "--start-pipelines", "3") as run:
        for pipeline in range(3):
            run.start(pipeline, partial(work, dies_in=10 if pipeline == 2 else 0))
        run.wait(lambda: run.jobs[2].ended(), "the death of pipeline 2")
        killed = run.rows(2)[0][-1]["at"]
        run.wait_for_turns([0, 1], 12)
        run.start(2, work)
        run.wait(lambda: len(run.rows(2)) == 2, "the newcomer's first turn")
        run.wait_for_turns([2], 16)
        codes = run.finish()
        assert codes == dict.fromkeys(range(3), [0] * num_stages), run.said()
        run.check_policy(sync=LocalSGD(every=1))
        check_that_nothing_is_lost(run)
        check_that_replicas_were_equal(run, [0, 1, 2])
        for survivor in (0, 1):
            longest, median = run.longest(survivor, killed)
            assert longest < median + limit(5.0).total_seconds(), (longest, median)
        first, *rows = run.rows(2)[-1]
        assert first["started"] > 0
        assert max(row.get("others", 0) for row in rows) > 2, "it averages with both"
