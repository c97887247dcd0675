"""Elastic runs for tests: a standing scheduler, and pipelines as jobs of forked processes, which are killed at will."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_sdpipe import SDPipeStrategy, SDPipeWeightAveraging, openmp
from lightning_sdpipe.policies import registry
from lightning_sdpipe.scheduler.credentials import write_keys
from lightning_sdpipe.scheduler.log.event_log import read_log
from lightning_sdpipe.worker.training import Phase
from recipes.harness import namespaces
from tests.patience import limit, until
from tests.workers import free_port, listening

BATCH = 4
SAMPLES = 96
SECONDS = 0.02
"""Of a batch."""
FINDING_OUT = 30.0  # seconds


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Samples that say which they are, with a number ``beside``."""

    def __init__(self, size: int, beside: float = 1.0) -> None:
        self.size, self.beside = size, beside

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index / self.size, self.beside]), torch.tensor(index)


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(SECONDS / 2)
        return x


class Model(L.LightningModule):
    """Each pipeline initialises it differently, as no script should."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ["SDPIPE_PIPELINE"]))
        self.net = nn.Sequential(nn.Linear(2, 8), Slow(), nn.BatchNorm1d(8), nn.Tanh(), Slow(), nn.Linear(8, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[0][:, :1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[0][:, :1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class ByHand(Model):
    """Two optimizers, which the training step steps one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()
        return loss.detach()

    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers():  # type: ignore[union-attr]
            schedule.step()  # type: ignore[call-arg]

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(half.parameters(), 0.01) for half in (self.net[:3], self.net[3:])]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]


def sums(module: L.LightningModule) -> dict[str, float]:
    """Of each of the tensors that this process has."""
    return {name: value.double().sum().item() for name, value in module.state_dict().items() if not value.is_meta}


class Diary(Callback):
    """Writes down what happens in this process, line by line: it may be killed."""

    def __init__(self, directory: Path) -> None:
        name = f"{os.environ['SDPIPE_PIPELINE']}-{os.environ['RANK']}-{os.getpid()}.jsonl"
        self.file = open(directory / name, "a", buffering=1)  # noqa: SIM115  # as long as the process
        self.before = time.monotonic()
        self.directory = directory

    def note(self, **what: Any) -> None:
        self.file.write(json.dumps({"at": time.monotonic(), **what}) + "\n")

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        steps = [int(state["step"]) for state in optimizer.state.values()]
        moments = max(steps, default=0)
        where = {"started": trainer.global_step, "epoch": trainer.current_epoch, "listens": listening()}
        strategy = trainer.strategy
        assert isinstance(strategy, SDPipeStrategy)
        where["averaged"] = [int(each) for each in strategy.training.sync.replica.averages if each.dim() == 0]
        self.note(**where, moments=moments, state=sums(module))
        self.before = time.monotonic()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.batch = batch[1].tolist()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, _: Any) -> None:
        """Before the scheduler can be told of it: this process may be killed at any moment."""
        strategy = trainer.strategy
        assert isinstance(strategy, SDPipeStrategy)
        if strategy.training.phase is Phase.FINISHING:  # with the gradients of others
            return
        self.note(trained=self.batch, epoch=trainer.current_epoch)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, _: Any, batch: Any, __: int) -> None:
        now, strategy = time.monotonic(), trainer.strategy
        assert isinstance(strategy, SDPipeStrategy)
        members = strategy.statistics.members - strategy.statistics.groups  # others that it averaged with
        seconds, self.before = now - self.before, now
        self.note(step=trainer.global_step, epoch=trainer.current_epoch, took=seconds, others=members)

    def on_validation_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.validated = sums(module)  # the average over time, if there is one

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.note(
            pause=trainer.global_step,
            epoch=trainer.current_epoch,
            state=sums(module),
            of=self.validated,
            metrics=metrics,
        )
        self.before = time.monotonic()

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.should_stop |= (self.directory / "stop").exists()  # on whoever sees it first

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.note(ended=trainer.global_step, rates=rates, leads=trainer.is_global_zero)


def fit(
    directory: Path,
    samples: int,
    options: dict[str, Any],
    accelerator: Any = "cpu",
    average: bool = False,
    more: Sequence[Callback] = (),
    model: Callable[[], L.LightningModule] = Model,
    evaluated: int = 16,
    beside: float = 1.0,
    **limits: Any,
) -> None:
    """What the user's script does: it trains until the test says stop. So many samples are ``evaluated`` at once, and
    those to be trained have a number ``beside``."""
    torch.set_num_threads(1)
    strategy = SDPipeStrategy(**{"timeout": limit(FINDING_OUT), **options})
    callbacks: list[Callback] = [SDPipeWeightAveraging(decay=0.9)] if average else []
    trainer = L.Trainer(
        accelerator=accelerator,
        strategy=strategy,
        default_root_dir=directory,
        max_epochs=10_000,
        logger=CSVLogger(directory, flush_logs_every_n_steps=1),
        log_every_n_steps=5,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, Diary(directory), *more, ModelCheckpoint(every_n_train_steps=10, save_top_k=-1)],
        **limits,
    )
    data, seen = Numbered(samples, beside), Subset(Numbered(samples), range(16))
    trainer.fit(model(), DataLoader(data, BATCH, shuffle=True), DataLoader(seen, evaluated))


class Job:
    """One start of a pipeline's job."""

    def __init__(self, run: ElasticRun, pipeline: int, work: Callable[[], None]) -> None:
        self.pipeline = pipeline
        self.codes: dict[int, int] = {}
        port = str(free_port())
        self.pids = [self._start(run, rank, port, work) for rank in range(run.num_stages)]

    def _start(self, run: ElasticRun, rank: int, port: str, work: Callable[[], None]) -> int:
        openmp.end_threads()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            output = os.open(run.directory / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(output, number)
                setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))  # else pytest's own
            logging.basicConfig(force=True)
            size = run.num_stages
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            place: dict[str, object] = {"SDPIPE_PIPELINE": self.pipeline, "SDPIPE_SCHEDULER": run.address, **world}
            place["SDPIPE_POLICY_FILE"] = run.policy
            place["GLOO_SOCKET_IFNAME"] = "lo"  # as sdpipe run sets it
            if run.hosts:
                namespaces.enter(run.hosts[self.pipeline])
                keys = run.directory / "keys/worker.key"
                place |= {"GLOO_SOCKET_IFNAME": namespaces.INTERFACE, "SDPIPE_KEY_FILE": keys}
            os.environ.update({name: str(value) for name, value in place.items()})
            os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
            work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def signal(self, number: signal.Signals, rank: int = 0) -> float:
        """Sends it to one process; the time."""
        os.kill(self.pids[rank], number)
        return time.monotonic()

    def ended(self) -> bool:
        """Have all processes ended?"""
        return None not in self.ended_with()

    def ended_with(self) -> list[int | None]:
        """The exit codes, by rank; None of a process that runs."""
        return [self._code(pid) for pid in self.pids]

    def _code(self, pid: int) -> int | None:
        if pid not in self.codes:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.codes[pid] = os.waitstatus_to_exitcode(status)
        return self.codes.get(pid)

    def kill(self) -> None:
        for pid in self.pids:
            if self._code(pid) is None:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                self.codes[pid] = os.waitstatus_to_exitcode(status)


class ElasticRun:
    """A run in ``directory``, whose scheduler is a process of its own: on this machine, or each pipeline on one of
    ``hosts``, the scheduler on that of the number ``center``, and encrypted. As under ``sdpipe run``, it begins when
    the first worker has written down the policy of the script."""

    def __init__(
        self,
        directory: Path,
        num_stages: int,
        num_pipelines: int,
        *options: str,
        hosts: Sequence[str] = (),
        center: int = 0,
    ) -> None:
        self.directory, self.num_stages, self.num_pipelines = directory, num_stages, num_pipelines
        self.hosts, self.center = hosts, center
        self.address = f"tcp://{namespaces.address(center) if hosts else '127.0.0.1'}:{free_port()}"
        self.policy, self._log = directory / "policy.json", directory / "events.jsonl"
        files = {"--newest": directory / "newest", "--policy-file": self.policy, "--log": self._log}
        self._options = [*(str(word) for pair in files.items() for word in pair), *options]
        if hosts:
            write_keys(directory / "keys")
            self._options += ["--key-file", str(directory / "keys/scheduler.key")]
        self.jobs: list[Job] = []
        self._read: dict[Path, tuple[int, list[dict[str, Any]]]] = {}
        self.start_scheduler()

    def start_scheduler(self) -> None:
        stages, pipelines = str(self.num_stages), str(self.num_pipelines)
        mesh = ["--stages", stages, "--pipelines", pipelines, "--bind", self.address]
        with open(self.directory / "scheduler.txt", "a") as output:
            waits = ["sh", "-c", 'until [ -e "$0" ]; do sleep 0.2; done; exec "$@"', str(self.policy)]
            command = [*waits, sys.executable, "-m", "lightning_sdpipe.cli", "scheduler", *mesh, *self._options]
            if self.hosts:
                command = ["ip", "netns", "exec", self.hosts[self.center], *command]
            self.scheduler = subprocess.Popen(command, stdout=output, stderr=output)

    def start(self, pipeline: int, work: Callable[[], None]) -> Job:
        self.jobs.append(Job(self, pipeline, work))
        return self.jobs[-1]

    def rows(self, pipeline: int, rank: int = 0) -> list[list[dict[str, Any]]]:
        """What each start of a worker wrote down, the oldest first."""
        rows = map(self._rows_of, self.directory.glob(f"{pipeline}-{rank}-*.jsonl"))
        return sorted(filter(None, rows), key=lambda of_a_start: of_a_start[0]["at"])

    def _rows_of(self, path: Path) -> list[dict[str, Any]]:
        """Reads on where it has read before: who waits asks often."""
        at, rows = self._read.get(path, (0, []))
        with path.open("rb") as file:
            file.seek(at)
            whole, end, _ = file.read().rpartition(b"\n")
        rows += map(json.loads, whole.splitlines())
        self._read[path] = at + len(whole + end), rows
        return rows

    def turns(self, pipeline: int) -> int:
        """Of the newest start."""
        rows = self.rows(pipeline)
        return sum("took" in row for row in rows[-1]) if rows else 0

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        until(holds, lambda: f"{what} did not happen:\n{self.said()}")

    def wait_for_turns(self, pipelines: Iterator[int] | range | list[int], more: int) -> None:
        """Until all of them have made so many turns more."""
        aims = {pipeline: self.turns(pipeline) + more for pipeline in pipelines}
        for pipeline, aim in aims.items():
            self._wait_while_it_runs(pipeline, lambda i=pipeline, aim=aim: self.turns(i) >= aim, f"turn {aim}")

    def wait_for_newcomer(self, pipeline: int) -> None:
        """Until the second start of a pipeline has made its first turn."""
        self._wait_while_it_runs(pipeline, lambda: len(self.rows(pipeline)) == 2, "the newcomer's first turn")

    def _wait_while_it_runs(self, pipeline: int, holds: Callable[[], bool], what: str) -> None:
        job = [job for job in self.jobs if job.pipeline == pipeline][-1]
        self.wait(lambda: (over := job.ended()) or holds() or over, f"{what} of pipeline {pipeline}")
        assert holds(), f"pipeline {pipeline} ended before {what}:\n{self.said()}"

    def lose_and_regain(
        self,
        dies: Callable[[], None],
        work: Callable[[], None],
        pipelines: int = 3,
        alone: int = 8,
        again: int = 8,
        kill_after: int = 0,
    ) -> float:
        """Starts so many ``pipelines``. The last one ``dies`` by itself, or is killed after so many turns; when the
        others have made some ``alone``, it comes back and makes some ``again``. The time of its death."""
        last = pipelines - 1
        for pipeline in range(pipelines):
            self.start(pipeline, dies if pipeline == last else work)
        if kill_after:
            self.wait_for_turns(range(pipelines), kill_after)
            self.jobs[last].signal(signal.SIGKILL)
        self.wait(self.jobs[last].ended, f"the death of pipeline {last}")
        died = self.rows(last)[0][-1]["at"]
        self.wait_for_turns(range(last), alone)
        self.start(last, work)
        self.wait_for_newcomer(last)
        self.wait_for_turns([last], again)
        return float(died)

    def finish_well(self, **options: Any) -> None:
        """Ends the run: all end well, groups were those of the ``options``, and replicas were equal at every pause, bit
        for bit, metrics too."""
        codes = self.finish()
        assert codes == dict.fromkeys(codes, [0] * self.num_stages), self.said()
        self.check_policy(**options)
        self.check_replicas(sorted(codes))

    def check_replicas(self, pipelines: Sequence[int]) -> None:
        """They were equal at every pause."""
        for rank in range(self.num_stages):
            pauses: dict[tuple[int, int], list[Any]] = {}
            for row in (row for pipeline in pipelines for row in self.rows(pipeline, rank)[-1] if "pause" in row):
                pauses.setdefault((row["epoch"], row["pause"]), []).append((row["state"], row["of"], row["metrics"]))
            assert pauses
            for at, seen in pauses.items():
                assert all(other == seen[0] for other in seen), (rank, at, seen)

    def check_samples(self, samples: int = SAMPLES) -> None:
        """None was lost in any epoch."""
        trained = self.trained()
        assert sorted(trained) == list(range(len(trained)))
        assert all(set(counts) == set(range(samples)) for counts in trained.values())

    def check_turns(self, pipelines: Sequence[int], at: float, seconds: float = 5.0) -> None:
        """None near ``at`` took that much longer than others."""
        for pipeline in pipelines:
            longest, median = self.longest(pipeline, at)
            assert longest < median + limit(seconds).total_seconds(), (longest, median)

    def finish(self) -> dict[int, list[int]]:
        """Ends the run with the epoch, and waits for all jobs; the exit codes of the last start of each pipeline."""
        (self.directory / "stop").touch()
        self.wait(lambda: all(job.ended() for job in self.jobs), "the end")
        return {job.pipeline: [job.codes[pid] for pid in job.pids] for job in self.jobs}

    def said(self) -> str:
        texts = [self.directory / "scheduler.txt", self.directory / "output.txt"]
        codes = [f"pipeline {job.pipeline}: exit codes by rank {job.ended_with()}" for job in self.jobs]
        return "\n".join([*(text.read_text()[-20000:] for text in texts if text.exists()), *codes])

    def check_policy(self, **options: Any) -> None:
        """That all groups were made by that of the script's options."""
        deciding = [each for each in read_log(self._log) if any(entry.decisions for entry in each.entries)]
        policies = [registry.from_plain(record.beginning.policy) for record in deciding]
        with mock.patch.dict(os.environ, {"SDPIPE_PIPELINE": "0", "SDPIPE_SCHEDULER": self.address}):
            method = SDPipeStrategy(**options).options.method
        assert policies == [getattr(method, "elastic_policy", method.policy)], policies

    def trained(self) -> dict[int, Counter[int]]:
        """How often each sample was trained in each epoch, by all."""
        found: dict[int, Counter[int]] = {}
        for pipeline in {job.pipeline for job in self.jobs}:
            for rows in self.rows(pipeline):
                for row in rows:
                    if "trained" in row:
                        found.setdefault(row["epoch"], Counter()).update(row["trained"])
        return found

    def longest(self, pipeline: int, at: float, seconds: float = 1.5) -> tuple[float, float]:
        """The longest turn from ``at`` on, and the median of all."""
        turns = [row for row in self.rows(pipeline)[-1] if "took" in row]
        took = sorted(row["took"] for row in turns)
        near = [row["took"] for row in turns if at <= row["at"] <= at + seconds]
        return max(near, default=0.0), took[len(took) // 2]

    def close(self) -> None:
        for job in self.jobs:
            job.kill()
        self.scheduler.kill()
        self.scheduler.wait()


@contextmanager
def elastic_run(
    directory: Path,
    num_stages: int,
    num_pipelines: int,
    *options: str,
    work: Callable[[], None] | None = None,
    **where: Any,
) -> Iterator[ElasticRun]:
    """All pipelines begin together, unless the options say how many do; with ``work``, if there is some."""
    if "--start-pipelines" not in options:
        options = ("--start-pipelines", str(num_pipelines), *options)
    run = ElasticRun(directory, num_stages, num_pipelines, *options, **where)
    try:
        for pipeline in range(num_pipelines) if work is not None else ():
            run.start(pipeline, work)
        yield run
    finally:
        run.close()
