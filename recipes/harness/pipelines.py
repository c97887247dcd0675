"""Elastic runs of forked pipelines on this machine, which can be killed and restarted at will.

Every process writes what it does to a diary, in lines of JSON that are in the file before it goes on: so what it did is
known however it ended. Times are from the system's monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import lightning as L
import torch

from lightning_sdpipe import openmp
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.scheduler.client.wire import ask_status
from lightning_sdpipe.scheduler.credentials import read_scheduler_keys, read_worker_keys, write_keys
from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.scheduler.server.process import SchedulerProcess, SchedulerSettings, reserve_port
from lightning_sdpipe.scheduler.server.server import WORKER_TIMEOUT, Endpoint, Files
from recipes.harness import namespaces
from recipes.harness.late_messages import DelayedLines
from recipes.harness.processes import be_rank

DIARY = "SDPIPE_DIARY"
"""The environment variable with the file of this process's diary."""


class Diary(L.Callback):
    """Writes down what this process does."""

    def __init__(self) -> None:
        self._file = os.open(os.environ[DIARY], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def say(self, **what: Any) -> None:
        """Write one line at once."""
        os.write(self._file, (json.dumps({"at": time.monotonic(), **what}) + "\n").encode())


@dataclass
class Record:
    """The lines that one process wrote: what happened, when, and at which update."""

    pipeline: int
    rank: int
    lines: list[dict[str, Any]] = field(default_factory=list)

    def said(self, what: str) -> list[dict[str, Any]]:
        """Return the lines that have the key ``what``."""
        return [line for line in self.lines if what in line]

    def times(self, what: str) -> list[float]:
        """Return the times of the lines that have the key ``what``."""
        return [line["at"] for line in self.said(what)]


Span = tuple[float, float]
"""When something began, and when it ended."""


def spans(records: Iterable[Record], what: str) -> list[Span]:
    """Return the spans between consecutive lines of one process that say so."""
    return [span for record in records for span in pairwise(record.times(what))]


def usual_and_longest(found: Sequence[Span], at: float) -> tuple[float, float]:
    """Return the median length of the spans that had ended by ``at``, and the largest length of the others."""
    usual = statistics.median(end - begin for begin, end in found if end <= at)
    return usual, max(end - begin for begin, end in found if end > at)


class Traces:
    """The files that processes leave in a directory: diaries, and logs of what they print."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._read: dict[Path, tuple[int, Record]] = {}

    def records(self, pipeline: int | str = "*", rank: int | str = "*") -> list[Record]:
        """Return the records of all processes so far, or of one pipeline or rank, in the order of their starts. Each
        call reads on where the previous one ended."""
        paths = sorted(self.directory.glob(f"*-{pipeline}-{rank}.diary"))
        for path in paths:
            _, number, place = path.stem.split("-")
            at, record = self._read.get(path) or (0, Record(int(number), int(place)))
            with path.open("rb") as file:
                file.seek(at)
                whole, end, _ = file.read().rpartition(b"\n")  # without an incomplete line
            record.lines += map(json.loads, whole.splitlines())
            self._read[path] = at + len(whole + end), record
        return [self._read[path][1] for path in paths]

    def said(self) -> str:
        """Return the end of what each process has printed."""
        ends = [f"{path.name}: {path.read_text()[-20000:]}" for path in sorted(self.directory.rglob("*.log"))]
        return "\n".join(end for end in ends if not end.endswith(": "))


class Pipelines(Traces):
    """A scheduler and the pipelines' processes, which end with the context.

    Args:
        directory: directory for all files.
        num_stages: M.
        num_pipelines: N, the number that begin together, unless ``terms`` gives another.
        worker_timeout: the scheduler's ``worker_timeout``.
        hosts: network namespaces, one for each pipeline and a last one for the scheduler, in which the calling thread
            is; empty if all are on this machine.
        latency: emulated seconds by which messages to and from the scheduler arrive late.
        log: file for the scheduler's events.
        terms: further fields of :class:`~lightning_sdpipe.membership.elastic_config.ElasticConfig`.
    """

    def __init__(
        self,
        directory: Path,
        num_stages: int,
        num_pipelines: int,
        *,
        worker_timeout: float = WORKER_TIMEOUT,
        hosts: Sequence[str] = (),
        latency: float = 0.0,
        log: Path | None = None,
        **terms: Any,
    ) -> None:
        super().__init__(directory)
        self.num_stages, self._hosts, logs = num_stages, hosts, directory / "logs"
        logs.mkdir(exist_ok=True)
        key_file, self._key_file = write_keys(directory / "keys")
        host = namespaces.address(len(hosts) - 1) if hosts else "127.0.0.1"
        bind = f"tcp://{'127.0.0.1' if latency else host}:*"
        self._lifelines = reserve_port() if latency else None
        lifeline_port = 0 if self._lifelines is None else self._lifelines.getsockname()[1]
        settings = SchedulerSettings(
            num_stages,
            num_pipelines,
            policy_file=logs / "policy.json",
            endpoint=Endpoint(bind, read_scheduler_keys(key_file), lifeline_port),
            worker_timeout=worker_timeout,
            files=Files(log=log, newest=logs / "newest"),
            elastic=ElasticConfig(**{"start_pipelines": num_pipelines, **terms}),
        )
        self.scheduler = SchedulerProcess(settings, logs / "scheduler.log", keeps_port=True)
        port = int(self.scheduler.address.rpartition(":")[2])
        self._lines = DelayedLines(host, [port, lifeline_port], latency) if latency else None
        self._environment = {
            "SDPIPE_SCHEDULER": f"tcp://{host}:{port}",
            "SDPIPE_KEY_FILE": self._key_file,
            "SDPIPE_POLICY_FILE": settings.policy_file,
            "GLOO_SOCKET_IFNAME": namespaces.INTERFACE if hosts else "lo",
        }
        self.killed_at: dict[int, float] = {}
        self._processes: dict[int, list[BaseProcess]] = {}
        self._ports: dict[int, socket.socket] = {}
        self.newest: dict[int, int] = {}
        """The number of the newest start of each pipeline."""

    def start(self, pipeline: int, work: Callable[[], object]) -> None:
        """Start the processes of a pipeline, each of which does ``work``. Start the scheduler, too, once a worker has
        told its policy."""
        self.end(pipeline)
        self._ports[pipeline] = port = reserve_port()
        self.newest[pipeline] = number = max(self.newest.values(), default=0) + 1
        self._processes[pipeline] = []
        openmp.end_threads()
        for rank in range(self.num_stages):
            path = self.directory / f"{number:04d}-{pipeline}-{rank}"
            path.with_suffix(".diary").touch()
            arguments = pipeline, rank, port.getsockname()[1], path, work
            process = multiprocessing.get_context("fork").Process(target=self._be, args=arguments, daemon=True)
            process.start()
            self._processes[pipeline].append(process)
        if not self.scheduler.started:
            self.wait(lambda: self.scheduler.can_start, "a worker to say what the scheduler decides by")
            self.scheduler.start()

    def _be(self, pipeline: int, rank: int, port: int, path: Path, work: Callable[[], object]) -> None:
        if self._hosts:
            namespaces.enter(self._hosts[pipeline])
        be_rank(rank, self.num_stages, port, SDPIPE_PIPELINE=pipeline, **self._environment)
        set_up(path)
        work()

    def restart_scheduler(self) -> float:
        """Kill the scheduler and restart it at once; return the seconds without one."""
        assert self.scheduler.pid
        began = time.monotonic()
        self.scheduler.bury()
        self.scheduler.start()
        return time.monotonic() - began

    def kill(self, pipeline: int, rank: int = 0, number: int = signal.SIGKILL) -> float:
        """Send a signal to one process from outside; return when."""
        process = self._processes[pipeline][rank]
        assert process.pid is not None
        self.killed_at[pipeline] = now = time.monotonic()
        os.kill(process.pid, number)
        return now

    def exit_codes(self, pipeline: int) -> list[int | None]:
        """Return the exit codes of the pipeline's processes, by rank; None for a live one."""
        return [process.exitcode for process in self._processes.get(pipeline, [])]

    def lives(self, pipeline: int) -> bool:
        """Return whether all of the pipeline's processes are alive."""
        return self.exit_codes(pipeline) == [None] * self.num_stages

    def ended(self, pipeline: int) -> bool:
        """Return whether all of the pipeline's processes have ended."""
        return None not in self.exit_codes(pipeline)

    def end(self, pipeline: int) -> None:
        """Kill the pipeline's processes."""
        for process in self._processes.pop(pipeline, []):
            process.kill()
            process.join()
        if pipeline in self._ports:
            self._ports.pop(pipeline).close()

    def status(self) -> Status:
        """Return what the scheduler says of the run."""
        return ask_status(self.scheduler.address, credentials=read_worker_keys(self._key_file), timeout=20)

    def members(self) -> list[int]:
        """Return the pipelines in the run."""
        members = self.status().members
        return [] if members is None else sorted(members.lives)

    def failure(self) -> str | None:
        """Return why the run has failed, according to the scheduler; None if it has not."""
        status = self.status()
        return status.failure or (None if status.members is None else status.members.over)

    def wait(self, until: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
        """Wait until ``until`` returns something true, and return that.

        Raises:
            TimeoutError: it did not in time; the message has what the processes printed last.
        """
        end = time.monotonic() + seconds
        while not (found := until()):
            if time.monotonic() > end:
                raise TimeoutError(f"waited {seconds:g} s for {what}; {self.said()}")
            time.sleep(0.01)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipeline in list(self._processes):
            self.end(pipeline)
        self.scheduler.bury()
        self.scheduler.close()
        if self._lines is not None:
            self._lines.close()


def set_up(path: Path) -> None:
    """Give this process a log and a diary beside ``path``, and one thread for computing."""
    log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(log, number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))  # the old one may be pytest's
    os.environ |= {DIARY: f"{path}.diary", "OMP_NUM_THREADS": "1"}  # else Lightning gives each job all processors
    torch.set_num_threads(1)
    logging.basicConfig(force=True)
