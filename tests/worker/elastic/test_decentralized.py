"""Rings and pairs of the pipelines that are there, on real processes, one of which is killed amid an exchange."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.payloads import EightBit
from lightning_sdpipe.sync import Decentralized
from lightning_sdpipe.worker.elastic.epoch_process_groups import EpochGroups
from tests.worker.elastic.jobs import elastic_run, fit
from tests.worker.elastic.test_runs import SAMPLES, check_that_nothing_is_lost, check_that_replicas_were_equal

pytestmark = pytest.mark.distributed


def kill_in_exchange(number: int) -> None:
    """Ends this process in its exchange of that number, when it has taken a piece over, and the others wait for it or
    have gone on."""
    moved, seen = EpochGroups.moved, [0]

    def moves(epochs: EpochGroups) -> None:
        moved(epochs)
        seen[0] += 1
        if seen[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    EpochGroups.moved = moves  # type: ignore[method-assign]


def train(directory: Path, sync: Decentralized, exchange: Exchange, num_stages: int, dies: bool = False) -> None:
    if dies and int(os.environ["RANK"]) == 0:
        kill_in_exchange(12)
    fit(directory, SAMPLES, {"sync": sync, "exchange": exchange, "num_stages": num_stages})


@pytest.mark.parametrize(
    ("sync", "exchange", "num_stages"),
    [
        (Decentralized("ring"), Exchange(EightBit(block=8, feedback=True)), 1),
        pytest.param(Decentralized("shift_one"), Exchange(overlap="step"), 1, marks=pytest.mark.slow),
        pytest.param(Decentralized("ring"), Exchange(overlap="step"), 2, marks=pytest.mark.slow),
        pytest.param(
            Decentralized("ring"), Exchange(EightBit(block=8), overlap="free", interval=0.02), 1, marks=pytest.mark.slow
        ),
        pytest.param(Decentralized("random", every=2), Exchange(EightBit(block=8)), 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_is_killed_in_an_exchange_and_comes_back(
    tmp_path: Path, sync: Decentralized, exchange: Exchange, num_stages: int
) -> None:
    with elastic_run(tmp_path, num_stages, 4, "--start-pipelines", "4") as run:
        for pipeline in range(4):
            run.start(pipeline, partial(train, tmp_path, sync, exchange, num_stages, dies=pipeline == 3))
        run.wait(lambda: run.jobs[3].ended(), "the death of pipeline 3")
        run.wait_for_turns([0, 1, 2], 12)
        run.start(3, partial(train, tmp_path, sync, exchange, num_stages))
        run.wait(lambda: len(run.rows(3)) == 2, "the newcomer's first turn")
        run.wait_for_turns([3], 12)
        codes = run.finish()
        assert set(codes) == {0, 1, 2, 3}
        assert {code for each in codes.values() for code in each} == {0}, run.said()
        run.check_policy(sync=sync)
        check_that_replicas_were_equal(run, [0, 1, 2, 3])
        check_that_nothing_is_lost(run)
        assert _others(run.rows(3)[-1]) > 1, "it has averaged with others"


def _others(rows: list[dict[str, Any]]) -> int:
    return max(row.get("others", 0) for row in rows)
