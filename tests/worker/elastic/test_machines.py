"""Pipelines on machines with names, on real processes that are killed and come back on another machine."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_sdpipe import Exchange
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.sync import LocalSGD
from tests.worker.elastic.jobs import Diary, ElasticRun, elastic_run, fit
from tests.worker.elastic.test_runs import SAMPLES, check_that_nothing_is_lost, check_that_replicas_were_equal

pytestmark = pytest.mark.distributed


class Machines(Callback):
    """Writes down by which machines this process averages, whenever these are others."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        (diary,) = (each for each in trainer.callbacks if isinstance(each, Diary))  # type: ignore[attr-defined]
        average = EncodedMean.average
        seen: list[dict[int, str]] = [{}]

        def averages(mover: EncodedMean, *arguments: Any) -> Any:
            hosts = dict(mover.hosts)  # type: ignore[arg-type]
            result = average(mover, *arguments)
            if hosts != seen[-1]:
                seen.append(hosts)
                diary.note(hosts=sorted(hosts.items()))
            return result

        EncodedMean.average = averages  # type: ignore[method-assign, assignment]


def kill_in_exchange(number: int) -> None:
    """Ends this process within its exchange of that number, when others of its group have begun to send."""
    local, seen = EncodedMean._of_host, [0]

    def of_host(*arguments: Any) -> Any:
        seen[0] += 1
        if seen[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return local(*arguments)

    EncodedMean._of_host = of_host  # type: ignore[method-assign, assignment]


def train(directory: Path, host: str, sync: Any, exchange: Exchange, dies_in: int = 0) -> None:
    os.environ["SDPIPE_HOST"] = host
    if dies_in:
        kill_in_exchange(dies_in)
    fit(directory, SAMPLES, {"sync": sync, "exchange": exchange}, more=[Machines()] if exchange != Exchange() else ())


def lose_and_regain(run: ElasticRun, work: Any, machines: str, back_on: str, dies_in: int = 0) -> None:
    """Pipeline 2 is killed, by itself within an exchange or from outside, and comes back on another machine."""
    for pipeline, host in enumerate(machines):
        run.start(pipeline, partial(work, host=host, dies_in=dies_in if pipeline == 2 else 0))
    if not dies_in:
        run.wait_for_turns([0, 1, 2], 12)
        run.jobs[2].signal(signal.SIGKILL)
    run.wait(lambda: run.jobs[2].ended(), "the death of pipeline 2")
    run.wait_for_turns([0, 1], 8)
    run.start(2, partial(work, host=back_on))
    run.wait(lambda: len(run.rows(2)) == 2, "the newcomer's first turn")
    run.wait_for_turns([2], 12)
    codes = run.finish()
    assert codes == {0: [0], 1: [0], 2: [0]}, run.said()
    check_that_nothing_is_lost(run)
    check_that_replicas_were_equal(run, [0, 1, 2])


def test_survivors_exchange_again_by_the_machines_that_are_left(tmp_path: Path) -> None:
    work = partial(train, tmp_path, sync=LocalSGD(every=1), exchange=Exchange(hierarchy="hosts"))
    with elastic_run(tmp_path, 1, 3, "--start-pipelines", "3") as run:
        lose_and_regain(run, work, "aab", "a", dies_in=20)
        run.check_policy(sync=LocalSGD(every=1))
        (rows,) = run.rows(0)
        machines = [[tuple(each) for each in row["hosts"]] for row in rows if "hosts" in row]
        assert machines[:3] == [[(0, "a"), (1, "a"), (2, "b")], [(0, "a"), (1, "a")], [(0, "a"), (1, "a"), (2, "a")]]
        assert sum(row.get("others", 0) > 0 for row in rows) > 20
