"""Pairs that average while they compute, in runs whose pipelines are killed amid an exchange and come back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_sdpipe import EightBit, Exchange
from lightning_sdpipe.exchange.moving import Pending
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.sync import ADPSGD, background_averaging
from lightning_sdpipe.topology.groups import Replicas
from tests.worker.elastic.jobs import SAMPLES, Diary, ElasticRun, elastic_run, fit

SYNC = ADPSGD(asynchronous=True)
pytestmark = pytest.mark.distributed


class Exchanges(Callback):
    """Writes down each exchange, and whether it was done. Kills this process in the exchange of that ``number`` in
    which it has that ``role``, when it has all of the other one's model and the other one has its own."""

    def __init__(self, role: str, number: int) -> None:
        self.role, self.left = role, number

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        (diary,) = (each for each in trainer.callbacks if isinstance(each, Diary))  # type: ignore[attr-defined]
        sync = trainer.strategy.training.sync  # type: ignore[attr-defined]
        run, whole = sync._pairs, background_averaging.exchange_whole

        def runs(group: Group, start: Callable[[Replicas], Pending]) -> bool:
            done: bool = run(group, start)
            diary.say(exchange=group.sequence, done=done, asked=Worker(0, own) not in group.passive)
            return done

        def exchanges(pending: Pending, group: Group, replicas: Replicas) -> None:
            self.left -= (Worker(0, own) in group.passive) == (self.role == "answers")
            if self.role and self.left == 0:
                pending.wait()
                diary.say(broken=group.sequence)
                os.kill(os.getpid(), signal.SIGKILL)
            whole(pending, group, replicas)

        own = int(os.environ["SDPIPE_PIPELINE"])
        sync._pairs = runs
        background_averaging.exchange_whole = exchanges


def train(directory: Path, exchange: Exchange, role: str = "") -> None:
    options = {"sync": SYNC, "exchange": exchange}
    fit(directory, SAMPLES, options, more=[Exchanges(role, 8)])


def check_exchanges(run: ElasticRun) -> None:
    """That each was done by both or by none, and that each worker counts those that it asked for and that were done."""
    outcomes: dict[int, set[bool]] = {}
    for pipeline in range(3):
        for rows in run.rows(pipeline):
            for row in rows:
                if "exchange" in row:
                    outcomes.setdefault(row["exchange"], set()).add(row["done"])
            counted = [row["others"] for row in rows if "others" in row]
            done = sum(row.get("asked", False) and row["done"] for row in rows)
            assert done - 1 <= counted[-1] <= done + 1, "but for one that is under way beside the last step"
    assert all(len(each) == 1 for each in outcomes.values()), outcomes
    (broken,) = (row["broken"] for rows in run.rows(2) for row in rows if "broken" in row)
    assert outcomes[broken] == {False}, "nothing of who died amid an exchange is in a model"
    assert sum(done == {True} for done in outcomes.values()) > 40


@pytest.mark.parametrize(
    ("exchange", "role"),
    [
        (Exchange(), "answers"),
        pytest.param(Exchange(EightBit(block=8), overlap="step"), "asks", marks=pytest.mark.slow),
    ],
    ids=["answers", "asks, in eight bits beside the next step"],
)
def test_one_is_killed_amid_an_exchange_and_comes_back_and_one_is_told_to_leave(
    tmp_path: Path, exchange: Exchange, role: str
) -> None:
    with elastic_run(tmp_path, 1, 3) as run:
        died = run.lose_and_regain(partial(train, tmp_path, exchange, role), partial(train, tmp_path, exchange))
        run.kill(1, number=signal.SIGTERM)  # it answers those that have drawn it, and leaves
        run.wait(lambda: run.ended(1), "the end of pipeline 1")
        run.wait_for_turns([0, 2], 4)
        codes = run.finish()
        assert codes == {0: [0], 1: [143], 2: [0]}, run.said()
        run.check_policy(sync=SYNC)
        run.check_samples()
        run.check_replicas([0, 1, 2])
        check_exchanges(run)
        run.check_turns([0, 1], died, 2.5)
        newcomer = run.rows(2)[-1]
        assert newcomer[0]["started"] > 0
        assert newcomer[0]["moments"] > 0  # the donor's optimizer
        assert any(row.get("others", 0) > 0 for row in newcomer)
