"""Rings and pairs of the pipelines that are there, on real processes, one of which is killed amid an exchange."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.payloads import EightBit
from lightning_sdpipe.sync import Decentralized
from lightning_sdpipe.sync.peers import _Surviving
from tests.worker.elastic.jobs import SAMPLES, die_in, elastic_run, fit

pytestmark = pytest.mark.distributed


def train(directory: Path, sync: Decentralized, exchange: Exchange, num_stages: int, dies: bool = False) -> None:
    if dies and int(os.environ["RANK"]) == 0:
        # It has taken a piece over, and the others wait for it or have gone on.
        die_in(_Surviving, "commit", 8, after=True)
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
    with elastic_run(tmp_path, num_stages, 4) as run:
        work = partial(train, tmp_path, sync, exchange, num_stages)
        run.lose_and_regain(partial(work, dies=True), work, pipelines=4)
        run.finish_well(sync=sync)
        run.check_samples()
        assert max(row.get("others", 0) for row in run.rows(3)[-1]) > 1, "it has averaged with others"
