"""Elastic runs of pipelines of unlike depths, on real processes that are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_sdpipe import ADPSGD, EightBit, Exchange, LocalSGD, NoSync, PartialReduce, SemiDecentralized
from lightning_sdpipe.worker.elastic import joining
from tests.worker.elastic.jobs import ElasticRun, Model, Slow, elastic_run, fit
from tests.worker.elastic.test_runs import SAMPLES, check_that_nothing_is_lost

pytestmark = pytest.mark.distributed


class Shared(Model):
    """Two blocks have one weight, and a scale lies outside of all blocks."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        second.weight = first.weight
        self.net = nn.Sequential(
            nn.Linear(2, 8), Slow(), nn.BatchNorm1d(8), first, Slow(), second, nn.Tanh(), nn.Linear(8, 1)
        )
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0] * self.scale), batch[0][:, :1])
        self.log("loss", loss)
        return loss


CUTS = {1: [8], 2: [4, 4], 3: [3, 2, 3]}


def held(trainer: L.Trainer) -> dict[str, Tensor]:
    """What this worker has: parameters, buffers, and the state of the optimizer."""
    module = trainer.lightning_module
    values = {name: value.clone() for name, value in module.state_dict().items() if not value.is_meta}
    for name, parameter in module.named_parameters():
        state = trainer.optimizers[0].state.get(parameter, {})
        values |= {f"{name}: {key}": value.clone() for key, value in state.items()}
    return values


class Beginning(Callback):
    """Keeps what a worker begins with."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        name = f"began-{os.environ['SDPIPE_PIPELINE']}-{os.environ['RANK']}-{os.getpid()}.pt"
        torch.save(held(trainer), self.directory / name)


def train(directory: Path, depths: Sequence[int], **options: Any) -> None:
    """What the user's script does. A donor keeps what its stages have when they give it."""
    give = joining.Fit.give

    def gives(self: joining.Fit, transfer: str, turns: Any) -> None:
        torch.save(held(self.trainer), directory / f"given-{transfer}-{os.environ['RANK']}.pt")
        give(self, transfer, turns)

    joining.Fit.give = gives  # type: ignore[method-assign]
    cuts = [CUTS[depth] for depth in depths]
    strategy = {"num_stages": [*depths], "partition": cuts, "num_micro_batches": 2, **options}
    fit(directory, SAMPLES, strategy, more=[Beginning(directory)], model=Shared, evaluated=4)


def train_and_die_in_transfers(directory: Path, depths: Sequence[int], **options: Any) -> None:
    """The same; the last stage of the first newcomer is killed as it receives, and the first stage of pipeline 1 as it
    gives to the second one."""
    place, transfers = (os.environ["SDPIPE_PIPELINE"], os.environ["RANK"]), joining.state_transfer
    send, receive = transfers.send_state, transfers.receive_state

    def sends(state: Any, store: Any, *more: Any) -> None:
        if place == ("1", "1") and store._room.startswith("state-2-2"):
            os.kill(os.getpid(), signal.SIGKILL)
        send(state, store, *more)

    def receives(store: Any, *more: Any) -> Any:
        if place == ("2", "0") and store._room.startswith("state-2-1"):
            os.kill(os.getpid(), signal.SIGKILL)
        return receive(store, *more)

    transfers.send_state, transfers.receive_state = sends, receives
    train(directory, depths, **options)


def check_that_replicas_were_equal(run: ElasticRun) -> None:
    """At every pause, by name and bit for bit, copies within a pipeline too."""
    pauses: dict[tuple[int, int], dict[str, set[float]]] = {}
    for pipeline, depth in enumerate(run.depths):
        for rank in range(depth):
            for rows in run.rows(pipeline, rank):
                for row in rows:
                    for name, value in row.get("state", {}).items() if "pause" in row else ():
                        pauses.setdefault((row["epoch"], row["pause"]), {}).setdefault(name, set()).add(value)
    assert pauses
    for at, values in pauses.items():
        assert {name: seen for name, seen in values.items() if len(seen) > 1} == {}, at


def check_that_it_began_with_what_was_given(run: ElasticRun, pipeline: int, transfer: str) -> None:
    """Bit for bit: each worker of the newest start of ``pipeline`` has what the donor had."""
    given: dict[str, Tensor] = {}
    for path in run.directory.glob(f"given-{transfer}-*.pt"):
        given |= torch.load(path)
    job = next(job for job in reversed(run.jobs) if job.pipeline == pipeline)
    began = [torch.load(run.directory / f"began-{pipeline}-{rank}-{pid}.pt") for rank, pid in enumerate(job.pids)]
    assert set().union(*began) == set(given)
    assert any("exp_avg" in name for name in given)
    for part in began:
        for name, value in part.items():
            assert torch.equal(value, given[name]), name


@pytest.mark.parametrize(
    "sync",
    [
        SemiDecentralized(),
        *(pytest.param(sync, marks=pytest.mark.slow) for sync in (PartialReduce(group_size=2), LocalSGD(every=2))),
    ],
    ids=str,
)
def test_three_stages_join_from_a_donor_of_one_and_the_reverse(tmp_path: Path, sync: Any) -> None:
    work = partial(train, tmp_path, (1, 3), sync=sync)
    with elastic_run(tmp_path, (1, 3), 2, "--start-pipelines", "2") as run:
        for pipeline in range(2):
            run.start(pipeline, work)
        run.wait_for_turns([0, 1], 10)
        run.jobs[1].signal(signal.SIGKILL, rank=1)  # its second stage
        run.wait(run.jobs[1].ended, "the end of its other stages")
        run.wait_for_turns([0], 5)
        run.start(1, work)
        run.wait(lambda: len(run.rows(1)) == 2, "the newcomer's first turn")
        run.wait_for_turns([0, 1], 10)
        run.jobs[0].signal(signal.SIGKILL)  # the leader
        run.wait_for_turns([1], 5)
        run.start(0, work)
        run.wait(lambda: len(run.rows(0)) == 2, "the newcomer's first turn")
        run.wait_for_turns([0, 1], 10)
        codes = run.finish()
        assert codes == {0: [0], 1: [0, 0, 0]}, run.said()
        check_that_nothing_is_lost(run)
        check_that_replicas_were_equal(run)
        check_that_it_began_with_what_was_given(run, 1, "state-1-1")
        check_that_it_began_with_what_was_given(run, 0, "state-0-2")
        for pipeline in (0, 1):
            rows = run.rows(pipeline)[-1]
            assert rows[0]["started"] > 0
            assert any(row.get("others", 0) > 0 for row in rows), "it averaged with the other one"


@pytest.mark.slow
def test_the_scheduler_is_killed_and_a_pipeline_without_it(tmp_path: Path) -> None:
    """The one that is started hears of the run, and the other one comes back to it."""
    work = partial(train, tmp_path, (1, 2), sync=NoSync())
    with elastic_run(tmp_path, (1, 2), 2, "--start-pipelines", "2") as run:
        for pipeline in range(2):
            run.start(pipeline, work)
        run.wait_for_turns([0, 1], 10)
        run.scheduler.kill()
        run.scheduler.wait()
        run.start_scheduler()
        run.wait_for_turns([0, 1], 15)
        run.scheduler.kill()
        run.scheduler.wait()
        run.jobs[1].signal(signal.SIGKILL)
        run.wait(run.jobs[1].ended, "the end of its other stage")
        run.start_scheduler()
        run.start(1, work)
        run.wait(lambda: len(run.rows(1)) == 2, "the newcomer's first turn")
        run.wait_for_turns([0, 1], 10)
        codes = run.finish()
        assert codes == {0: [0], 1: [0, 0]}, run.said()
        check_that_nothing_is_lost(run)
        check_that_replicas_were_equal(run)


def test_a_newcomer_and_a_donor_are_killed_in_the_transfer(tmp_path: Path) -> None:
    exchange = Exchange(EightBit(block=8), overlap="step")
    work = partial(train_and_die_in_transfers, tmp_path, (1, 2, 2), sync=ADPSGD(), exchange=exchange)
    with elastic_run(tmp_path, (1, 2, 2), 3, "--start-pipelines", "2") as run:
        for pipeline in range(2):
            run.start(pipeline, work)
        run.wait_for_turns([0, 1], 5)
        killed = run.start(2, work)
        run.wait(killed.ended, "the death of the newcomer")
        run.wait_for_turns([0, 1], 5)
        run.start(2, work)
        run.wait(run.jobs[1].ended, "the death of the donor")
        run.wait(lambda: len(run.rows(2)) == 1, "the newcomer's first turn")
        run.wait_for_turns([0, 2], 10)
        codes = run.finish()
        assert codes == {0: [0], 1: [1, -signal.SIGKILL], 2: [0, 0]}, run.said()
        check_that_nothing_is_lost(run)
        check_that_replicas_were_equal(run)
        check_that_it_began_with_what_was_given(run, 2, "state-2-3")
