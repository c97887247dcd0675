"""Whole elastic runs, on real processes that are killed: the others go on, and who comes back takes part."""

from __future__ import annotations

import csv
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.trainer.states import RunningStage

from lightning_sdpipe import EightBit, Exchange
from lightning_sdpipe.membership.members import Met
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.sync import PHDPSGD, LocalSGD, SemiDecentralized
from lightning_sdpipe.sync.barriers import Barriers
from lightning_sdpipe.topology.placement_file import Placement, write_placement
from lightning_sdpipe.worker.elastic import run as elastic_worker
from recipes.harness import namespaces
from tests.namespaces import hosts
from tests.patience import limit
from tests.worker.elastic import jobs
from tests.worker.elastic.jobs import SAMPLES, ByHand, Diary, ElasticRun, Model, elastic_run, fit, sums

pytestmark = pytest.mark.distributed

Work = Callable[..., None]


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return partial(fit, tmp_path, samples=SAMPLES, options={})


@pytest.mark.parametrize(
    ("sync", "exchange", "model"),
    [
        (SemiDecentralized(), Exchange(EightBit(block=8), overlap="step"), ByHand),
        pytest.param(LocalSGD(every=2), Exchange(), Model, marks=pytest.mark.slow),
        (PHDPSGD(groups=[[0], [1, 2]], within="models", times=[1, 1, 1]), Exchange(), Model),  # type: ignore[arg-type]
        pytest.param(
            PHDPSGD(groups=[[0, 1], [2]], within="models", every=2),  # type: ignore[arg-type]
            Exchange(EightBit(block=8)),
            Model,
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_one_is_killed_and_comes_back(tmp_path: Path, sync: Any, exchange: Exchange, model: type[Model]) -> None:
    work = partial(fit, tmp_path, samples=SAMPLES, options={"sync": sync, "exchange": exchange}, model=model)
    with elastic_run(tmp_path, 1, 3) as run:
        killed = run.lose_and_regain(work, work, kill_after=8)
        run.finish_well(sync=sync)
        run.check_samples()
        run.check_turns([0, 1], killed)
        rows = run.rows(2)[-1]
        assert rows[0]["started"] > 0
        assert rows[0]["moments"] > 0  # the donor's optimizer
        assert rows[-1]["rates"] == run.rows(0)[-1][-1]["rates"]  # and its schedule
        assert any(row.get("others", 0) > 0 for row in rows)


def test_a_stage_is_killed_and_its_pipeline_comes_back(tmp_path: Path) -> None:
    work = partial(fit, tmp_path, samples=SAMPLES, options={"num_stages": 2}, average=True)
    with elastic_run(tmp_path, 2, 2, work=work) as run:
        run.wait_for_turns([0, 1], 10)
        run.kill(0, rank=1)  # stage 0 of the leader
        run.wait(lambda: run.ended(0), "the end of the other stage")
        run.wait_for_turns([1], 5)
        run.comes_back(0, work, 12)
        run.ends_as({0: [0, 0], 1: [0, 0]})
        for rank in (0, 1):
            first = run.rows(0, rank)[-1][0]
            assert first["averaged"][0] > 0  # the donor's average
            pauses = [row for rows in run.rows(0, rank) for row in rows if "pause" in row]
            assert all(row["state"] != row["of"] for row in pauses)
        listens = [rows[0]["listens"] for pipeline in (0, 1) for rank in (0, 1) for rows in run.rows(pipeline, rank)]
        assert listens == [["127.0.0.1"]] * 6


def fit_on_host(directory: Path, placement: Path, host: str) -> None:
    os.environ["SDPIPE_HOST"] = host
    logging.basicConfig(filename=directory / f"{host}.log", force=True)
    fit(directory, samples=SAMPLES, options={"num_stages": 3, "num_micro_batches": 2, "placement": placement})


def test_stages_are_ordered_by_the_placement_and_of_a_newcomer_it_does_not_know_as_by_default(tmp_path: Path) -> None:
    """Also under a scheduler that is killed and started again."""
    path = tmp_path / "placement.json"
    write_placement(path, Placement("a test", {}, False, None, (("near:1", "near:2", "near:0"),)))
    with elastic_run(tmp_path, 3, 2) as run:
        for pipeline, host in enumerate(("near", "far")):
            run.start(pipeline, partial(fit_on_host, tmp_path, path, host))
        run.wait_for_turns([0, 1], 10)
        run.restart_scheduler()
        run.wait_for_turns([0, 1], 15)
        codes = run.finish()
        assert codes == {0: [0] * 3, 1: [0] * 3}, run.said()
        assert all(max(counts.values()) <= 2 for counts in run.trained().values())  # a shuffled epoch may be padded
        near, far = ([run.rows(pipeline, rank)[0][0]["state"] for rank in range(3)] for pipeline in (0, 1))
        assert near == [far[0], far[2], far[1]], "pipelines that begin together, begin equal, stage by stage"
        assert len({tuple(held) for held in near}) == 3
        pauses = [
            [[row["state"] for row in run.rows(pipeline, rank)[0] if "pause" in row][-1] for rank in range(3)]
            for pipeline in (0, 1)
        ]
        assert pauses[0] == [pauses[1][0], pauses[1][2], pauses[1][1]]
        run.check_samples()
        message = (
            "Pipeline 1 runs its stages in the default order, not in that of the placement: it does not know far:0"
        )
        assert (tmp_path / "far.log").read_text().count(message) == 1
        assert "default order" not in (tmp_path / "near.log").read_text()


def fit_unless_killed_at_the_beginning(directory: Path) -> None:
    """Pipeline 0 is, in stage 1, when its stage 0 has met the others."""
    met = directory / "met"

    class Watched(Barriers):
        def meet(self, says: bytes = b"") -> Met:
            if self._worker == Worker(1, 0) and self._begun:
                while not met.exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            here = super().meet(says)
            if self._worker == Worker(0, 0) and self._begun:
                met.touch()
            return here

    elastic_worker.Barriers = Watched  # type: ignore[misc]
    fit(directory, samples=SAMPLES, options={"num_stages": 2})


def test_a_stage_is_killed_while_several_begin_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the pipeline whose state all others would have had."""
    work = partial(fit_unless_killed_at_the_beginning, tmp_path)
    with elastic_run(tmp_path, 2, 3, work=work) as run:
        run.wait_for_turns([1, 2], 12)
        run.ends_as({0: [-signal.SIGKILL, 1], 1: [0, 0], 2: [0, 0]})
        monkeypatch.setenv("SDPIPE_PIPELINE", "1")
        expected, seen = sums(Model()), [run.rows(pipeline, rank)[0][0] for pipeline in (1, 2) for rank in range(2)]
        assert all(row["state"].items() <= expected.items() for row in seen), (expected, seen)
        assert {name for row in seen for name in row["state"]} == set(expected)


def test_leaders_go_and_others_lead_on(tmp_path: Path, work: Work) -> None:
    with elastic_run(tmp_path, 1, 3, work=work) as run:
        run.wait_for_turns([0, 1, 2], 25)
        run.kill(0)  # the oldest, and of those that began together the first, leads
        run.wait_for_turns([1, 2], 10)
        run.wait_for_turns([1, 2], 10)
        left = run.kill(1, number=signal.SIGTERM)
        run.wait(lambda: run.ended(1), "the end of pipeline 1")
        run.wait_for_turns([2], 30)
        run.ends_as({0: [-signal.SIGKILL], 1: [128 + signal.SIGTERM], 2: [0]})
        assert "pipeline 1 left" in run.said()
        run.check_turns([2], left)
        (logs,) = (tmp_path / "lightning_logs").iterdir()
        steps = [int(row["step"]) for row in csv.DictReader((logs / "metrics.csv").open())]
        assert steps[0] < 20  # of the first leader
        last = run.rows(2)[-1][-1]
        assert last["leads"]
        assert max(steps) > last["ended"] - 10  # of the last one
        saved = {int(path.stem.split("=")[-1]) for path in (logs / "checkpoints").iterdir()}
        due = set(range(10, last["ended"] + 1, 10))
        reached = max(row.get("step", 0) for row in run.rows(0)[-1])
        assert due - {10 * -(-reached // 10)} <= saved <= due  # its next checkpoint may have died with the first leader


def fit_and_stop_while_writing(directory: Path) -> None:
    """Pipeline 0 is stopped when it has written a checkpoint, and not yet put it in its place."""
    jobs.ModelCheckpoint = partial(jobs.ModelCheckpoint, save_last=True)  # type: ignore[misc]
    save, stopped = torch.save, directory / "stopped"

    def stops(state: Any, file: Any) -> None:
        save(state, file)
        if "last.ckpt" in str(getattr(file, "name", "")) and not stopped.exists():
            stopped.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    torch.save = stops
    fit(directory, samples=SAMPLES, options={})


def test_a_leader_that_wakes_up_late_writes_nothing_over_the_checkpoint_of_the_next_one(tmp_path: Path) -> None:
    work = partial(fit_and_stop_while_writing, tmp_path)
    with elastic_run(tmp_path, 1, 2, worker_timeout=2.0, work=work) as run:
        run.wait(lambda: "pipeline 0 is gone" in run.said(), "the loss of the leader")
        run.wait(lambda: any(tmp_path.rglob("last.ckpt")), "a checkpoint of the next leader")
        (path,) = tmp_path.rglob("last.ckpt")
        before = torch.load(path, weights_only=False)["global_step"]
        run.kill(0, number=signal.SIGCONT)
        run.wait(lambda: run.ended(0), "the end of the one that woke up")
        assert torch.load(path, weights_only=False)["global_step"] >= before
        run.ends_as({0: [1], 1: [0]})
        assert not [left for left in path.parent.iterdir() if left.suffix == ".writing"]
        last = max(int(saved.stem.split("=")[-1]) for saved in path.parent.glob("*step=*"))
        assert torch.load(path, weights_only=False)["global_step"] == last


@pytest.mark.parametrize("scheduler", ["lives", pytest.param("dies, too", marks=pytest.mark.slow)])
def test_all_are_killed_and_those_that_come_go_on_from_the_newest_checkpoint(
    tmp_path: Path, work: Work, scheduler: str
) -> None:
    with elastic_run(tmp_path, 1, 2, resume=True, work=work) as run:
        run.wait_for_turns([0, 1], 25)
        for pipeline in range(2):
            run.kill(pipeline)
        if scheduler != "lives":
            run.restart_scheduler()
        run.codes("the end of all")
        for pipeline in range(2):
            run.start(pipeline, work)
        run.wait(lambda: all(len(run.rows(pipeline)) == 2 for pipeline in range(2)), "their first turns")
        run.wait_for_turns([0, 1], 10)
        run.ends_as({0: [0], 1: [0]})
        started = {run.rows(pipeline)[-1][0]["started"] for pipeline in range(2)}
        assert len(started) == 1
        assert min(started) >= 10
        assert "start again from" in run.said()
        assert f"step={min(started)}.ckpt" in run.said()
        assert not list((tmp_path / "logs").glob("newest*")), "the run has finished"


class MyTime(Timer):
    """Has run out where the test says so."""

    def __init__(self, directory: Path) -> None:
        super().__init__({"hours": 1})
        self.late = directory / f"late-{os.environ['SDPIPE_PIPELINE']}"

    def time_elapsed(self, stage: str = RunningStage.TRAINING) -> float:
        return 1e6 if self.late.exists() else super().time_elapsed(stage)


class NotedSaves(ModelCheckpoint):
    def on_train_batch_end(self, trainer: L.Trainer, *more: Any) -> None:
        (diary,) = (each for each in trainer.callbacks if isinstance(each, Diary))  # type: ignore[attr-defined]
        before = self._last_global_step_saved
        super().on_train_batch_end(trainer, *more)
        if self._last_global_step_saved != before:
            diary.say(saves=trainer.global_step)


def fit_by_the_clock(directory: Path, num_stages: int) -> None:
    saves = NotedSaves(directory / "by-time", train_time_interval=timedelta(seconds=0.2), save_top_k=-1)
    more = [MyTime(directory), saves]
    fit(directory, SAMPLES, {"num_stages": num_stages}, more=more, val_check_interval={"seconds": 0.3})


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_leaders_clock_counts(tmp_path: Path, num_stages: int) -> None:
    work = partial(fit_by_the_clock, tmp_path, num_stages)

    def seen(rows: list[dict[str, Any]], what: str) -> list[int]:
        return [row[what] for row in rows if what in row]

    with elastic_run(tmp_path, num_stages, 3, work=work) as run:
        run.wait_for_turns([0, 1, 2], 10)
        run.kill(2)
        run.wait(lambda: run.ended(2), "the end of pipeline 2")
        (tmp_path / "late-1").touch()  # which does not lead
        run.start(2, work)
        run.wait_for_newcomer(2)
        run.wait_for_turns([0, 1, 2], 10)
        assert not any(map(run.ended, range(3))), run.said()
        run.kill(0)
        codes = run.codes("the end by the next leader's clock")
        assert codes[1] == codes[2] == [0] * num_stages, run.said()
        run.check_replicas([1, 2])
        old, new = run.rows(1)[-1], run.rows(2)[-1]
        assert seen(old, "ended") == seen(new, "ended")
        for what in ("saves", "pause"):
            assert len(seen(new, what)) > 1
            assert seen(old, what)[-len(seen(new, what)) :] == seen(new, what)


def test_too_few_wait_for_more(tmp_path: Path, work: Work) -> None:
    with elastic_run(tmp_path, 1, 2, min_pipelines=2, work=work) as run:
        run.wait_for_turns([0, 1], 10)
        run.kill(0)
        run.wait(lambda: "training waits for more" in run.said(), "the pause")
        paused_at = time.monotonic()
        run.start(0, work)
        run.wait(lambda: bool(run.rows(0)) and run.turns(0) > 0 and len(run.rows(0)) == 2, "the newcomer's turn")
        begins = run.rows(0)[-1][0]["at"]
        (rows,) = run.rows(1)
        turns = sum("took" in row and paused_at < row["at"] < begins for row in rows)
        assert turns <= 5  # what was under way, and what it may train while the newcomer sets out
        run.ends_as({0: [0], 1: [0]})


def test_newcomers_that_were_never_there(tmp_path: Path, work: Work) -> None:
    with elastic_run(tmp_path, 1, 2, work=work) as run:
        run.wait_for_turns([0, 1], 8)
        run.start(5, partial(work, beside=1.5))  # two at once, above the number by which an epoch is counted
        run.start(3, work)
        run.wait(lambda: all(run.turns(i) > 8 for i in (3, 5)), "the newcomers' turns")
        run.kill(0)  # two at once, all but newcomers
        run.kill(1)
        run.wait_for_turns([3, 5], 12)
        run.ends_as({0: [-9], 1: [-9], 3: [0], 5: [0]})
        assert run.rows(3)[-1][-1]["leads"] != run.rows(5)[-1][-1]["leads"]
        assert "different training data: sample 0 on pipeline 5 differs from that on pipeline" in run.said()


@contextmanager
def on_hosts(directory: Path, num_pipelines: int, work: Callable[[], None]) -> Iterator[ElasticRun]:
    """Each pipeline has a host of its own, and so has the scheduler, the last one."""
    with (
        hosts(num_pipelines + 1) as names,
        namespaces.inside(names[-1]),
        elastic_run(directory, 1, num_pipelines, worker_timeout=2.0, hosts=names, work=work) as run,
    ):
        yield run


def test_a_machine_is_cut_off_and_its_pipeline_is_told_to_end_when_it_is_back(tmp_path: Path, work: Work) -> None:
    with on_hosts(tmp_path, 2, work) as run:
        run.wait_for_turns([0, 1], 10)
        namespaces.plug(1, False)
        run.wait_for_turns([0], 10)
        assert not run.ended(1)
        namespaces.plug(1, True)
        run.wait(lambda: run.ended(1), "the end of the one that was cut off")
        assert all(code and code > 0 for code in run.exit_codes(1)), run.said()
        run.comes_back(1, work, 8)
        run.ends_as({0: [0], 1: [0]})


def test_a_scheduler_is_cut_off_for_longer_than_the_limit_of_silence(tmp_path: Path, work: Work) -> None:
    with on_hosts(tmp_path, 2, work) as run:
        run.wait_for_turns([0, 1], 10)
        namespaces.plug(2, False)
        run.wait(lambda: "seems to be cut off" in run.said(), "the scheduler to notice")
        time.sleep(2.0)
        namespaces.plug(2, True)
        run.wait_for_turns([0, 1], 10)
        run.ends_as({0: [0], 1: [0]})
        assert "is gone" not in run.said()
        assert [len(run.rows(pipeline)) for pipeline in range(2)] == [1, 1]


def test_of_two_machines_that_cannot_reach_each_other_the_younger_is_put_out(tmp_path: Path) -> None:
    work = partial(fit, tmp_path, samples=SAMPLES, options={"timeout": timedelta(minutes=5)})
    with on_hosts(tmp_path, 3, work) as run:
        run.wait_for_turns([0, 1, 2], 10)
        parted = time.monotonic()
        for number in (0, 1):
            namespaces.part(number)
        run.wait(lambda: run.ended(1), "the end of pipeline 1")
        assert time.monotonic() - parted < limit(45).total_seconds(), "of 2 s, and some epochs"
        run.wait_for_turns([0, 2], 10)
        assert "cannot reach pipelines 0" in run.said()
        run.ends_as({0: [0], 1: [1], 2: [0]})
