"""Elastic runs of forked pipelines on this machine, for the suites that kill them.

Every process says when it has made an update, in lines of JSON that are in the file before it goes on: what a process
did is known however it ended. Times are of the system's monotonic clock, which is one for all processes.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_sdpipe import Exchange, SDPipeStrategy
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.scheduler.client.connection import ask_status
from lightning_sdpipe.scheduler.credentials import read_scheduler_keys, read_worker_keys, write_keys
from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.scheduler.server.process import SchedulerProcess, SchedulerSettings, reserve_port
from lightning_sdpipe.scheduler.server.server import USUAL_LIMITS, Endpoint, Files, Limits
from lightning_sdpipe.sync import AllReduce
from lightning_sdpipe.worker.elastic import state_transfer
from lightning_sdpipe.worker.options import Schedule
from recipes.suites import namespaces
from recipes.suites.emulated import Validated, passes
from recipes.suites.faults.injected_faults import Diary, Fault, inject
from recipes.suites.late_messages import DelayedLines
from recipes.suites.trainings import make_trainer, quiet, random_features

GLANCE = 0.01


@dataclass(frozen=True)
class Work:
    """The training of every pipeline.

    Args:
        num_stages: M.
        num_pipelines: N, by which epochs are counted.
        sync: a method.
        batch_seconds: of a mini-batch, emulated.
        num_parameters: of a stage.
        batches: of an epoch and pipeline.
        epochs: of the run.
        validation_batches: after each epoch.
        checkpoint_every: so many updates; 0 for never.
        schedule: of the pipelines.
        exchange: of the method; with ``hierarchy="hosts"`` two consecutive pipelines share a machine by name.
    """

    num_stages: int
    num_pipelines: int
    sync: Any
    batch_seconds: float = 0.06
    num_parameters: int = 65536
    batches: int = 2000
    epochs: int = 1
    validation_batches: int = 0
    checkpoint_every: int = 0
    schedule: Schedule = "1f1b"
    exchange: Exchange = field(default_factory=Exchange)
    seed: int = 1


@dataclass
class Record:
    """A line that one process wrote: what happened, when, and at which update."""

    pipeline: int
    rank: int
    lines: list[dict[str, Any]] = field(default_factory=list)

    def times(self, what: str) -> list[float]:
        """When that happened."""
        return [line["at"] for line in self.lines if line["what"] == what]


class World:
    """A scheduler and the pipelines' processes; ``close`` ends them all.

    Args:
        directory: for all files.
        work: of every pipeline.
        limits: of the scheduler.
        resumes: whether the run goes on from its newest checkpoint when all are lost.
        target: what every process runs, as :func:`train`.
        hosts: namespaces of the network, one of each pipeline, and at the end that of the scheduler, in which the
            calling thread is; none if all are on this machine.
        late: seconds by which what hosts and the scheduler say to each other arrives late, emulated by a proxy.
    """

    def __init__(
        self,
        directory: Path,
        work: Any,
        limits: Limits = USUAL_LIMITS,
        resumes: bool = False,
        target: Callable[..., None] | None = None,
        hosts: Sequence[str] = (),
        late: float = 0.0,
    ) -> None:
        self.directory, self.work, self._target, self._hosts = directory, work, target or train, hosts
        self.logs = directory / "logs"
        self.logs.mkdir(exist_ok=True)
        key_file, self._key_file = write_keys(directory / "keys")
        host = namespaces.address(len(hosts) - 1) if hosts else "127.0.0.1"
        bind = f"tcp://{'127.0.0.1' if late else host}:*"
        self._lifelines = reserve_port() if late else None
        lifeline_port = 0 if self._lifelines is None else self._lifelines.getsockname()[1]
        settings = SchedulerSettings(
            work.num_stages,
            work.num_pipelines,
            policy_file=self.logs / "policy.json",
            endpoint=Endpoint(bind, read_scheduler_keys(key_file), lifeline_port),
            limits=limits,
            files=Files(journal=self.logs / "journal"),
            elastic=ElasticConfig(start_pipelines=work.num_pipelines, resume=resumes),
        )
        self.scheduler = SchedulerProcess(settings, self.logs / "scheduler.log", keeps_port=True)
        port = int(self.scheduler.address.rpartition(":")[2])
        self._lines = DelayedLines(host, [port, lifeline_port], late) if late else None
        self._reached_at = f"tcp://{host}:{port}"
        self.killed_at: dict[int, float] = {}
        self._processes: dict[int, list[BaseProcess]] = {}
        self._ports: dict[int, socket.socket] = {}
        self._launches = 0
        self._newest: dict[int, int] = {}

    def launch(self, pipeline: int, fault: Fault | None = None, rank: int = 0) -> None:
        """Start its processes; ``fault`` is for the one of ``rank``."""
        self.end(pipeline)
        port = self._ports[pipeline] = reserve_port()
        environment = {
            "WORLD_SIZE": str(self.work.num_stages),
            "LOCAL_WORLD_SIZE": str(self.work.num_stages),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port.getsockname()[1]),
            "SDPIPE_PIPELINE": str(pipeline),
            "SDPIPE_SCHEDULER": self._reached_at,
            "SDPIPE_KEY_FILE": str(self._key_file),
            "SDPIPE_POLICY_FILE": str(self.logs / "policy.json"),
        }
        if self._hosts:
            environment["GLOO_SOCKET_IFNAME"] = namespaces.INTERFACE
        context = multiprocessing.get_context("fork")
        self._processes[pipeline] = []
        self._launches += 1
        self._newest[pipeline] = self._launches
        for each in range(self.work.num_stages):
            own = environment | {"RANK": str(each), "LOCAL_RANK": str(each)}
            name = f"{self._launches:04d}-{pipeline}-{each}"
            arguments = (self.work, self.directory, name, own, fault if each == rank else None)
            process = context.Process(target=self._run_worker, args=(pipeline, *arguments), daemon=True)
            process.start()
            self._processes[pipeline].append(process)

    def _run_worker(self, pipeline: int, *arguments: Any) -> None:
        if self._hosts:
            namespaces.enter(self._hosts[pipeline])
        self._target(*arguments)

    def start(self, faults: Mapping[int, Fault] = MappingProxyType({}), rank: int = 0) -> None:
        """Start all pipelines, and the scheduler as soon as a worker has said what by; ``faults``, by pipeline, are
        for their processes of ``rank``."""
        for pipeline in range(self.work.num_pipelines):
            self.launch(pipeline, faults.get(pipeline), rank)
        self.wait(lambda: self.scheduler.can_start, "a worker to say what the scheduler decides by")
        self.scheduler.start()

    def restart_scheduler(self) -> float:
        """Kill it, and start it again at once; the seconds without one."""
        assert self.scheduler.pid
        began = time.monotonic()
        self.scheduler.bury()
        self.scheduler.start()
        return time.monotonic() - began

    def kill(self, pipeline: int, rank: int = 0, number: int = signal.SIGKILL) -> None:
        """A signal to one process, from outside."""
        process = self._processes[pipeline][rank]
        assert process.pid is not None
        self.killed_at[pipeline] = time.monotonic()
        os.kill(process.pid, number)

    def lives(self, pipeline: int) -> bool:
        """Return whether all of its processes live."""
        return all(process.is_alive() for process in self._processes[pipeline])

    def exit_codes(self, pipeline: int) -> list[int | None]:
        """Return the exit codes of its processes; None of those that live."""
        return [process.exitcode for process in self._processes.get(pipeline, [])]

    def end(self, pipeline: int) -> None:
        """Kill its processes."""
        for process in self._processes.pop(pipeline, []):
            process.kill()
            process.join()
        if pipeline in self._ports:
            self._ports.pop(pipeline).close()

    def records(self) -> list[Record]:
        """Return what all processes have said so far, in the order of their starts."""
        return read_records(self.directory)

    def start_of(self, pipeline: int) -> int:
        """The number of its newest start."""
        return self._newest[pipeline]

    def updates(self, pipeline: int) -> int:
        """Return how far its newest start is."""
        path = self.directory / f"{self._newest[pipeline]:04d}-{pipeline}-0.diary"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        made = [line["update"] for line in map(json.loads, lines) if line["what"] == "update"]
        return made[-1] if made else 0

    def status(self) -> Status:
        """Return what the scheduler says of the run."""
        return ask_status(self.scheduler.address, credentials=read_worker_keys(self._key_file), timeout=20)

    def members(self) -> list[int]:
        """Pipelines in the run."""
        members = self.status().members
        return [] if members is None else sorted(members.lives)

    def failure(self) -> str | None:
        """Return why the scheduler says that the run has failed, if it does."""
        status = self.status()
        return status.failure or (None if status.members is None else status.members.over)

    def gone_at(self, pipeline: int, since: float) -> float | None:
        """When the scheduler said, from the monotonic time ``since`` on, that a pipeline is gone."""
        for line in (self.logs / "scheduler.log").read_text().split("\n"):
            when, _, rest = line.partition(f"WARNING pipeline {pipeline} is gone")
            if rest:
                clock = time.mktime(time.strptime(when[:19], "%Y-%m-%d %H:%M:%S")) + int(when[20:23]) / 1e3
                at = clock - time.time() + time.monotonic()
                if at >= since - 0.002:  # its log has milliseconds
                    return max(at, since)
        return None

    def wait(self, until: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
        """Wait until ``until`` returns something true, and return that.

        Raises:
            TimeoutError: it was not, with what the processes have printed last.
        """
        end = time.monotonic() + seconds
        while not (found := until()):
            if time.monotonic() > end:
                raise TimeoutError(f"waited {seconds:g} s for {what}; {self.said()}")
            time.sleep(GLANCE)
        return found

    def said(self) -> str:
        """The ends of what all processes have printed."""
        return said(self.directory)

    def close(self) -> None:
        for pipeline in list(self._processes):
            self.end(pipeline)
        self.scheduler.bury()
        self.scheduler.close()
        if self._lines is not None:
            self._lines.close()


def said(directory: Path) -> str:
    """Return the ends of what processes have printed, as their logs have it."""
    ends = [f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(directory.rglob("*.log"))]
    return "\n".join(end for end in ends if not end.endswith(": "))


def read_records(directory: Path) -> list[Record]:
    """Return what the processes of :func:`train` have said there; a line that is not whole is left out."""
    found = []
    for path in sorted(directory.glob("*.diary")):
        _, pipeline, rank = path.stem.split("-")
        lines = path.read_text().split("\n")[:-1]
        found.append(Record(int(pipeline), int(rank), [json.loads(line) for line in lines]))
    return found


@contextmanager
def world(directory: Path, work: Work, limits: Limits = USUAL_LIMITS) -> Iterator[World]:
    """All pipelines of ``work`` started; they are not waited for."""
    made = World(directory, work, limits)
    try:
        yield made
    finally:
        made.close()


def set_up(directory: Path, name: str, environment: Mapping[str, str]) -> None:
    """Make this process a worker's: with a log of its own and ``environment``."""
    log = os.open(directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {**environment, "OMP_NUM_THREADS": "1"}  # else Lightning gives each job all processors
    torch.set_num_threads(1)
    quiet()
    logging.getLogger("lightning_sdpipe").setLevel(logging.INFO)


def train(work: Work, directory: Path, name: str, environment: Mapping[str, str], fault: Fault | None = None) -> None:
    """One worker, in a process of its own; ``environment`` says which, and whether the run is elastic."""
    set_up(directory, name, environment)
    torch.manual_seed(work.seed)
    module = Validated(work.num_stages, *passes(work.batch_seconds / work.num_stages), work.num_parameters)
    elastic = "SDPIPE_PIPELINE" in environment
    if work.exchange.hierarchy == "hosts":
        os.environ["SDPIPE_HOST"] = f"machine-{int(environment['SDPIPE_PIPELINE']) // 2}"
    shape: dict[str, Any] = {"num_stages": 1 if elastic else work.num_stages}
    strategy = SDPipeStrategy(
        **shape,
        sync=work.sync,
        exchange=work.exchange,
        num_micro_batches=1,
        schedule=work.schedule,
        data="dealt" if elastic or not isinstance(work.sync, AllReduce) else "sharded",
        timeout=timedelta(seconds=60),
    )
    diary = Diary(directory / f"{name}.diary")
    callbacks: list[L.Callback] = [diary]
    if work.checkpoint_every:
        callbacks.append(ModelCheckpoint(directory / "checkpoints", every_n_train_steps=work.checkpoint_every))
    trainer = make_trainer(
        strategy,
        1 if elastic else work.num_stages * work.num_pipelines,
        *callbacks,
        max_epochs=work.epochs,
        limit_val_batches=work.validation_batches,
        num_sanity_val_steps=0,
        enable_checkpointing=bool(work.checkpoint_every),
    )
    loader = random_features(work.batches * work.num_pipelines, 1)
    validation = random_features(work.validation_batches, 1) if work.validation_batches else None
    if fault is not None:
        inject(fault, trainer, module, diary)
    note_transfers(diary)
    trainer.fit(module, loader, validation)


def note_transfers(diary: Diary) -> None:
    """Make a newcomer say how long its state was on its way, and how large its tensors are."""
    whole = state_transfer.receive_state

    def receive(*arguments: Any) -> dict[str, Any]:
        began = time.monotonic()
        state = whole(*arguments)
        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
        diary.say("received", seconds=time.monotonic() - began, bytes=sum(each.nbytes for each in tensors))
        return state

    setattr(state_transfer, "receive_state", receive)  # noqa: B010  # of another signature
