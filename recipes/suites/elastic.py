"""Elastic runs of forked pipelines on this machine, for the suites that kill them; and faults by which a process ends
itself in a phase of a step, or of what pipelines do between steps.

Every process says what it does in a diary, in lines of JSON that are in the file before it goes on: what a process did
is known however it ended. Times are of the system's monotonic clock, which is one for all processes.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_sdpipe import Exchange, SDPipeStrategy
from lightning_sdpipe.exchange import encoded_mean, moving, outer_state, present_rounds
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.scheduler.client import client
from lightning_sdpipe.scheduler.client.wire import ask_status
from lightning_sdpipe.scheduler.credentials import read_scheduler_keys, read_worker_keys, write_keys
from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.scheduler.server.process import SchedulerProcess, SchedulerSettings, reserve_port
from lightning_sdpipe.scheduler.server.server import WORKER_TIMEOUT, Endpoint, Files
from lightning_sdpipe.sync import background_averaging, barriers, peers
from lightning_sdpipe.worker.elastic import state_transfer
from lightning_sdpipe.worker.options import Schedule
from lightning_sdpipe.worker.training import Phase
from recipes.harness import namespaces
from recipes.harness.late_messages import DelayedLines, arrive_late
from recipes.suites.emulated import EmulatedChain, passes
from recipes.suites.trainings import fit, make_trainer, quiet, random_features

GLANCE = 0.01
PHASES = (
    *("forward", "backward", "optimizer", "waiting", "exchange", "half_sent", "step_end"),
    *("pause", "validation", "checkpoint", "donor", "newcomer"),
)


@dataclass(frozen=True)
class Fault:
    """A process kills itself in ``phase`` of the first update from ``after`` on that it makes itself."""

    phase: str
    after: int


def emulated(work: Work, pipeline: int) -> Sequence[Any]:
    """Return a module that sleeps, and its data."""
    module = EmulatedChain(work.num_stages, *passes(work.batch_seconds / work.num_stages), work.num_parameters)
    sizes = [work.batches, work.validation_batches] if work.validation_batches else [work.batches]
    return [module, *(random_features(size, 1) for size in sizes)]


@dataclass(frozen=True)
class Work:
    """The training of every pipeline.

    Args:
        num_stages: M.
        num_pipelines: N.
        sync: a method.
        batches: of all pipelines in an epoch.
        make: returns the module and the loaders of a pipeline, for training and validation.
        batch_seconds: of a mini-batch, emulated.
        num_parameters: of an emulated stage.
        epochs: of the run.
        validation_batches: after each epoch.
        checkpoint_every: so many updates; 0 for never.
        schedule: of the pipelines.
        exchange: of the method; with ``hierarchy="hosts"`` two consecutive pipelines share a machine by name.
        latency: seconds by which messages between workers, and those to and from the scheduler, arrive late, emulated.
        timeout: of the strategy, in seconds.
        seed: of the model.
    """

    num_stages: int
    num_pipelines: int
    sync: Any
    batches: int
    make: Callable[[Any, int], Sequence[Any]] = emulated
    batch_seconds: float = 0.06
    num_parameters: int = 65536
    epochs: int = 1
    validation_batches: int = 0
    checkpoint_every: int = 0
    schedule: Schedule = "1f1b"
    exchange: Exchange = field(default_factory=Exchange)
    latency: float = 0.0
    timeout: float = 60.0
    seed: int = 1


@dataclass
class Record:
    """A record has the lines that one process wrote: what happened, when, and at which update."""

    pipeline: int
    rank: int
    lines: list[dict[str, Any]] = field(default_factory=list)

    def said(self, what: str) -> list[dict[str, Any]]:
        """Return the lines that say so."""
        return [line for line in self.lines if line["what"] == what]

    def times(self, what: str) -> list[float]:
        """Return when that happened."""
        return [line["at"] for line in self.said(what)]


class World:
    """A scheduler and the pipelines' processes, which end with the context.

    Args:
        directory: for all files.
        work: of every pipeline.
        limits: of the scheduler.
        resumes: whether the run goes on from its newest checkpoint when all are lost.
        hosts: namespaces of the network, one of each pipeline, and at the end that of the scheduler, in which the
            calling thread is; none if all are on this machine.
    """

    def __init__(
        self,
        directory: Path,
        work: Work,
        worker_timeout: float = WORKER_TIMEOUT,
        resumes: bool = False,
        hosts: Sequence[str] = (),
    ) -> None:
        self.directory, self.work, self._hosts, late = directory, work, hosts, work.latency
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
            worker_timeout=worker_timeout,
            files=Files(newest=self.logs / "newest"),
            elastic=ElasticConfig(start_pipelines=work.num_pipelines, resume=resumes),
        )
        self.scheduler = SchedulerProcess(settings, self.logs / "scheduler.log", keeps_port=True)
        port = int(self.scheduler.address.rpartition(":")[2])
        self._lines = DelayedLines(host, [port, lifeline_port], late) if late else None
        self._reached_at = f"tcp://{host}:{port}"
        self.killed_at: dict[int, float] = {}
        self._processes: dict[int, list[BaseProcess]] = {}
        self._ports: dict[int, socket.socket] = {}
        self.newest: dict[int, int] = {}
        """The number of the newest start of each pipeline."""

    def launch(self, pipeline: int, fault: Fault | None = None, rank: int = 0) -> None:
        """Start its processes; ``fault`` is for the one of ``rank``."""
        self.end(pipeline)
        port, depth = reserve_port(), self.work.num_stages
        self._ports[pipeline] = port
        environment = {
            "WORLD_SIZE": str(depth),
            "LOCAL_WORLD_SIZE": str(depth),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port.getsockname()[1]),
            "SDPIPE_PIPELINE": str(pipeline),
            "SDPIPE_SCHEDULER": self._reached_at,
            "SDPIPE_KEY_FILE": str(self._key_file),
            "SDPIPE_POLICY_FILE": str(self.logs / "policy.json"),
            **({"GLOO_SOCKET_IFNAME": namespaces.INTERFACE} if self._hosts else {}),
        }
        self.newest[pipeline] = start = max(self.newest.values(), default=0) + 1
        self._processes[pipeline] = []
        for each in range(depth):
            own = environment | {"RANK": str(each), "LOCAL_RANK": str(each)}
            arguments = (pipeline, f"{start:04d}-{pipeline}-{each}", own, fault if each == rank else None)
            process = multiprocessing.get_context("fork").Process(target=self._run_worker, args=arguments, daemon=True)
            process.start()
            self._processes[pipeline].append(process)

    def _run_worker(self, pipeline: int, name: str, environment: Mapping[str, str], fault: Fault | None) -> None:
        if self._hosts:
            namespaces.enter(self._hosts[pipeline])
        train(self.work, self.directory, name, environment, fault)

    def start(self, faults: Mapping[int, Fault] | None = None, rank: int = 0) -> None:
        """Start all pipelines, and the scheduler as soon as a worker has said what by; ``faults``, by pipeline, are
        for their processes of ``rank``."""
        for pipeline in range(self.work.num_pipelines):
            self.launch(pipeline, (faults or {}).get(pipeline), rank)
        self.wait(lambda: self.scheduler.can_start, "a worker to say what the scheduler decides by")
        self.scheduler.start()

    def restart_scheduler(self) -> float:
        """Kill it, and start it again at once; return the seconds without one."""
        assert self.scheduler.pid
        began = time.monotonic()
        self.scheduler.bury()
        self.scheduler.start()
        return time.monotonic() - began

    def kill(self, pipeline: int, rank: int = 0, number: int = signal.SIGKILL) -> None:
        """Send a signal to one process, from outside."""
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

    def updates(self, pipeline: int) -> int:
        """Return how far its newest start is."""
        path = self.directory / f"{self.newest[pipeline]:04d}-{pipeline}-0.diary"
        made = [line["update"] for line in _lines(path) if line["what"] == "update"] if path.exists() else []
        return made[-1] if made else 0

    def status(self) -> Status:
        """Return what the scheduler says of the run."""
        return ask_status(self.scheduler.address, credentials=read_worker_keys(self._key_file), timeout=20)

    def members(self) -> list[int]:
        """Return the pipelines in the run."""
        members = self.status().members
        return [] if members is None else sorted(members.lives)

    def failure(self) -> str | None:
        """Return why the scheduler says that the run has failed, if it does."""
        status = self.status()
        return status.failure or (None if status.members is None else status.members.over)

    def wait(self, until: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
        """Wait until ``until`` returns something true, and return that.

        Raises:
            TimeoutError: it was not, with what the processes have printed last.
        """
        end = time.monotonic() + seconds
        while not (found := until()):
            if time.monotonic() > end:
                raise TimeoutError(f"waited {seconds:g} s for {what}; {said(self.directory)}")
            time.sleep(GLANCE)
        return found

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
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
    """Return what the processes of :func:`train` have said there."""
    diaries = sorted(directory.glob("*.diary"))
    places = [[int(part) for part in path.stem.split("-")] for path in diaries]
    return [Record(pipeline, rank, _lines(path)) for path, (_, pipeline, rank) in zip(diaries, places, strict=True)]


def _lines(diary: Path) -> list[dict[str, Any]]:
    """Return the lines but one that is not whole."""
    return [json.loads(line) for line in diary.read_text().split("\n")[:-1]]


class Diary(L.Callback):
    """Writes down the samples of each batch that is trained, where they have numbers, and each update with its loss and
    the bytes sent so far; Lightning's loop has turns in which none is made."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._batch: Any = None
        self._stepped = False

    def say(self, what: str, **more: Any) -> None:
        """Write one line, now."""
        os.write(self._file, (json.dumps({"what": what, "at": time.monotonic()} | more) + "\n").encode())

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.say("start", update=trainer.global_step)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *_: Any) -> None:
        self._batch = batch

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        """Say it before the scheduler can be told of it: this process may be killed at any moment."""
        self._stepped, strategy = True, trainer.strategy
        assert isinstance(strategy, SDPipeStrategy)
        own = strategy.training.phase is not Phase.FINISHING  # with the gradients of others
        if own and isinstance(self._batch, Sequence):
            self.say("trained", epoch=trainer.current_epoch, samples=[int(number) for number in self._batch[0]])

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        strategy, more = trainer.strategy, dict[str, Any]()
        if isinstance(strategy, SDPipeStrategy):
            if not self._stepped:
                return
            self._stepped = False
            loss = None if outputs is None else float(outputs["loss"])
            more = {"epoch": trainer.current_epoch, "loss": loss, "sent": strategy.statistics.bytes_sent}
        self.say("update", update=trainer.global_step, processor=time.process_time(), **more)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        sent = trainer.strategy.statistics.bytes_sent if isinstance(trainer.strategy, SDPipeStrategy) else 0
        self.say("end", update=trainer.global_step, sent=sent)


def set_up(directory: Path, name: str, environment: Mapping[str, str]) -> Diary:
    """Make this process a worker's: with a log and a diary of its own and ``environment``."""
    log = os.open(directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {**environment, "OMP_NUM_THREADS": "1"}  # else Lightning gives each job all processors
    torch.set_num_threads(1)
    quiet()
    logging.getLogger("lightning_sdpipe").setLevel(logging.INFO)
    return Diary(directory / f"{name}.diary")


def train(work: Work, directory: Path, name: str, environment: Mapping[str, str], fault: Fault | None = None) -> None:
    """Be one worker, in a process of its own; ``environment`` says which."""
    diary, pipeline = set_up(directory, name, environment), int(environment["SDPIPE_PIPELINE"])
    if work.exchange.hierarchy == "hosts":
        os.environ["SDPIPE_HOST"] = f"machine-{pipeline // 2}"
    if work.latency:
        arrive_late(work.latency)
    torch.manual_seed(work.seed)
    module, *loaders = work.make(work, pipeline)
    strategy = SDPipeStrategy(
        sync=work.sync,
        exchange=work.exchange,
        num_micro_batches=None if work.schedule == "pipedream" else 1,
        schedule=work.schedule,
        data="dealt",
        timeout=timedelta(seconds=work.timeout),
    )
    callbacks: list[L.Callback] = [diary]
    if work.checkpoint_every:
        callbacks.append(ModelCheckpoint(directory / "checkpoints", every_n_train_steps=work.checkpoint_every))
    trainer = make_trainer(
        strategy,
        1,
        *callbacks,
        max_epochs=work.epochs,
        limit_val_batches=work.validation_batches,
        num_sanity_val_steps=0,
        enable_checkpointing=bool(work.checkpoint_every),
    )
    if fault is not None:
        inject(fault, trainer, diary)
    note_transfers(diary)
    fit(trainer, module, loaders)


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


class _Here(L.Callback):
    """Strikes in a phase that Lightning calls."""

    def __init__(self, phase: str, strike: Callable[..., None]) -> None:
        hooks = {
            "forward": "on_train_batch_start",
            "backward": "on_before_backward",
            "optimizer": "on_before_optimizer_step",
            "step_end": "on_train_batch_end",
            "validation": "on_validation_batch_start",
            "checkpoint": "on_save_checkpoint",
        }
        if phase in hooks:
            setattr(self, hooks[phase], strike)


def inject(fault: Fault, trainer: L.Trainer, diary: Diary) -> None:
    """From the update ``fault.after`` on this process ends itself when it comes to ``fault.phase``."""

    def strike(*_: Any) -> None:
        if trainer.global_step >= fault.after or fault.phase == "newcomer":
            diary.say("strikes", update=trainer.global_step)
            os.kill(os.getpid(), signal.SIGKILL)

    # This callback comes after the others, so that what they note of a step is noted.
    trainer.callbacks.append(_Here(fault.phase, strike))  # type: ignore[attr-defined]
    before: dict[str, list[tuple[Any, str]]] = {
        "waiting": [(client.SchedulerClient, "group")],
        "exchange": [
            (peers._Surviving, "wait"),
            (present_rounds.PresentRounds, "outcome"),
            (outer_state.OuterState, "make"),
            (background_averaging, "exchange_whole"),
        ],
        "pause": [(barriers.Barriers, "meet")],
        "donor": [(state_transfer, "send_state")],
    }
    after: dict[str, list[tuple[Any, str]]] = {
        "half_sent": [
            (peers._Surviving, "commit"),
            (present_rounds.PresentRounds, "_reduce"),
            (encoded_mean.EncodedMean, "average"),
            (moving._Pair, "wait"),
        ],
        "newcomer": [(state_transfer, "receive_state")],
    }
    for places, strikes in ((before, (strike, _nothing)), (after, (_nothing, strike))):
        for owner, name in places.get(fault.phase, []):
            setattr(owner, name, _between(getattr(owner, name), *strikes))


def _nothing() -> None: ...


def _between(whole: Callable[..., Any], first: Callable[[], None], last: Callable[[], None]) -> Callable[..., Any]:
    def struck(*arguments: Any, **more: Any) -> Any:
        first()
        outcome = whole(*arguments, **more)
        last()
        return outcome

    return struck
