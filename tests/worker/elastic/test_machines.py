"""Pipelines on machines with names, on real processes that are killed and come back on another machine."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_sdpipe import Exchange
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.sync import LocalSGD
from recipes.harness import pipelines
from recipes.harness.processes import hook
from tests.worker.elastic.jobs import SAMPLES, die_in, elastic_run, fit

pytestmark = pytest.mark.distributed


def note_machines() -> None:
    """Write down by which machines this process averages, whenever these are others."""
    diary, seen = pipelines.Diary(), list[list[Any]]([[]])

    def averages(mover: EncodedMean, *_: Any) -> None:
        hosts = sorted(dict(mover.hosts).items())  # type: ignore[arg-type]
        if hosts != seen[-1]:
            seen.append(hosts)
            diary.say(hosts=hosts)

    hook(EncodedMean, "average", averages, after=True)


def train(directory: Path, host: str, sync: Any, exchange: Exchange, dies_in: int = 0) -> None:
    os.environ["SDPIPE_HOST"] = host
    if dies_in:
        die_in(EncodedMean, "_of_host", dies_in)  # when others of its group have begun to send
    note_machines()
    fit(directory, SAMPLES, {"sync": sync, "exchange": exchange})


def test_survivors_exchange_again_by_the_machines_that_are_left(tmp_path: Path) -> None:
    sync, exchange = LocalSGD(every=1), Exchange(hierarchy="hosts")
    work = partial(train, tmp_path, sync=sync, exchange=exchange)
    with elastic_run(tmp_path, 1, 3) as run:
        run.lose_and_regain(partial(work, host="b", dies_in=20), partial(work, host="a"))
        run.finish_well(sync=sync)
        run.check_samples()
        (rows,) = run.rows(0)
        machines = [[tuple(each) for each in row["hosts"]] for row in rows if "hosts" in row]
        assert machines[:3] == [[(0, "a"), (1, "a"), (2, "b")], [(0, "a"), (1, "a")], [(0, "a"), (1, "a"), (2, "a")]]
        assert sum(row.get("others", 0) > 0 for row in rows) > 20
