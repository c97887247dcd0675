"""One worker's connection to the scheduler: how it finds the scheduler, which rank 0 starts unless one runs already;
its client; what each process is told when a worker fails; and the end of one that cannot end by itself.

gloo offers no way to wake a thread that waits for a tensor of another process while that process lives, or for one that
was under way when the connection was lost. So when a run has ended and a worker has not noticed within a few seconds,
another thread, the :class:`Watchdog`, prints the reason and gives up. It also checks whether what is waited for can
still come.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import LOST_CONNECTION, ConfigurationError, SchedulerError, WorkerFailedError
from lightning_sdpipe.lightning_internals import is_local_path
from lightning_sdpipe.membership.members import FIXED
from lightning_sdpipe.partition.pipeline_cut import PipelineCut
from lightning_sdpipe.partition.plan import Plan
from lightning_sdpipe.pipeline.lock_step import port_of_store, tell_waits
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler.client.client import Callbacks, SchedulerClient
from lightning_sdpipe.scheduler.credentials import WorkerKeys, worker_keys
from lightning_sdpipe.scheduler.membership_protocol import End
from lightning_sdpipe.scheduler.server.process import SchedulerProcess
from lightning_sdpipe.topology.groups import keep_until_the_end, open_groups
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.worker.launching import job

_PATIENCE = 2.0  # seconds in which a worker that computes, or waits for the scheduler, ends by itself
_LOOK = 2.0  # seconds between two looks
_GLANCE = 0.25  # seconds in which a wait that has just succeeded is over
_BY_SIGNAL = (
    (KeyboardInterrupt, 128 + signal.SIGINT, "ended by Ctrl-C"),
    (SIGTERMException, 128 + signal.SIGTERM, "ended by SIGTERM"),
)
_LAST_WORDS = 5.0  # seconds
_OTHERS_DEPART = 30.0  # seconds that rank 0 keeps its scheduler for the others
MakePlans = Callable[[Sequence[PipelineCut]], Sequence[Plan]]
"""Makes the plan of each cut, the same on every rank; all must call it."""


def ended_by(exception: BaseException) -> str:
    """Return the signal by which ``exception`` ends this process, in words; empty if by none. A script's own handler
    may have raised SystemExit, with the usual code."""
    for kind, code, said in _BY_SIGNAL:
        if isinstance(exception, kind) or (isinstance(exception, SystemExit) and exception.code == code):
            return said
    return ""


class Watchdog:
    """A timer that is armed when another worker has failed, and disarmed when this one has noticed.

    Args:
        describe: describes a failure, for users.
        give_up: ends this process's wait.
        lost: called once, in another thread, when the connection over which this worker waits for a message has ended.
        stalled: called in that thread with what this worker waits for, and the addresses that acknowledge nothing, once
            no byte has come or gone for ``limit()`` seconds; and with an empty tuple once bytes move again.
        port: that of the scheduler, with which bytes are always exchanged.
    """

    def __init__(
        self,
        describe: Callable[[End], str],
        give_up: Callable[[], None],
        lost: Callable[[str], None],
        stalled: Callable[[tuple[str, ...]], None] = lambda _: None,
        limit: Callable[[], float] = lambda: math.inf,
        port: int = 0,
    ) -> None:
        self._describe = describe
        self._give_up = give_up
        self._lost = lost
        self._stalled, self._limit, self._port = stalled, limit, port
        self._timer: threading.Timer | None = None
        self._noticed = threading.Event()
        self._looking = threading.Thread(target=self._look, name="watchdog", daemon=True)
        self._telling: threading.Thread | None = None

    def watch(self) -> None:
        """Check from now on, until disarmed, whether what is waited for can still come."""
        self._looking.start()

    def arm(self, failure: End) -> None:
        if self._timer is None and not self._noticed.is_set():
            self._timer = threading.Timer(_PATIENCE, self._end, [failure])
            self._timer.daemon = True
            self._timer.start()

    def disarm(self) -> None:
        self._noticed.set()
        for thread in (self._looking, self._telling):
            if thread is not None and thread.is_alive():
                thread.join(_PATIENCE)  # it holds process groups, which must not outlive the interpreter in a thread
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        before: set[p2p.Wait] = set()
        moved, since, stalled = 0, time.monotonic(), tuple[str, ...]()
        while not self._noticed.wait(_LOOK):
            now = p2p.waited_for()
            self._tell(before & now)
            for wait in before & now:
                error = wait.lost()  # also of a wait that has just succeeded, if its sender is gone since
                if error is not None and not self._noticed.wait(_GLANCE) and wait in p2p.waited_for():
                    self._lost(str(error))
                    return
            limit = self._limit()
            ports = self._port, port_of_store()
            seen = p2p.traffic(ports, limit / 2) if before & now else None
            if seen is None or seen[0] != moved:
                moved, since = seen[0] if seen else 0, time.monotonic()
            told: tuple[str, ...] = ()
            if seen is not None and time.monotonic() - since >= limit:
                told = " and ".join(sorted(map(str, now))), *sorted(seen[1])
            if told != stalled:
                stalled = told
                self._stalled(told)
            before = now

    def _tell(self, waits: set[p2p.Wait]) -> None:
        """Tell other workers of ``waits`` in a thread, since the store by which they hear may be out of reach."""
        if waits and (self._telling is None or not self._telling.is_alive()):
            self._telling = threading.Thread(target=tell_waits, args=[waits], name="telling waits", daemon=True)
            self._telling.start()

    def _end(self, failure: End) -> None:
        if not self._noticed.is_set():
            print(self._describe(failure), file=sys.stderr, flush=True)
            self._give_up()


@dataclass(frozen=True)
class SchedulerAddress:
    """Address of the scheduler, and the keys to it."""

    address: str
    keys: WorkerKeys | None


def standing_scheduler(address: str | None, key_file: str | Path | None) -> SchedulerAddress | None:
    """Return the scheduler that another program runs: as given, or as SDPIPE_SCHEDULER and SDPIPE_KEY_FILE name it.

    Raises:
        ConfigurationError: the address is not one, or the key file cannot be read, or others can read it.
    """
    name, address = ("scheduler", address) if address else ("SDPIPE_SCHEDULER", os.environ.get("SDPIPE_SCHEDULER"))
    if address is None:
        return None
    if "://" not in address:
        raise ConfigurationError(f"{name}={address!r} is no address, as in tcp://10.0.0.1:5555.")
    key_file = key_file or os.environ.get("SDPIPE_KEY_FILE")
    return SchedulerAddress(address, worker_keys(address, key_file or None))


def scheduler_log(directory: str | Path | None, standing: SchedulerAddress | None) -> Path | None:
    """Return the log file in ``directory`` for a scheduler that rank 0 starts.

    Raises:
        ConfigurationError: there is a ``standing`` scheduler, which writes its own log, or the directory is not local.
    """
    if directory is not None and not is_local_path(directory):
        raise ConfigurationError(f"log_dir={str(directory)!r} is no directory of rank 0's machine; give one there.")
    if directory is not None and standing is not None:
        raise ConfigurationError(
            f"log_dir={str(directory)!r} does not reach the scheduler at {standing.address}, which runs already; leave "
            "it out, and start that one with --log."
        )
    return None if directory is None else Path(directory, "scheduler.jsonl")


def start_scheduler(
    policy: PolicyConfig, mesh: Mesh, bind: str, log: Path | None = None
) -> tuple[SchedulerProcess | None, SchedulerAddress]:
    """Let rank 0 start the run's own scheduler, which writes a ``log``; every rank must call it and gets its address.

    The scheduler's keys go through the run's process group, not through the command line, the environment or a file.
    """
    scheduler, told = None, b""
    if dist.get_rank() == 0:
        depths = () if mesh.alike else mesh.depths
        scheduler = SchedulerProcess.embedded(policy, mesh.num_stages, mesh.num_pipelines, bind, log=log, depths=depths)
        keys = msgspec.to_builtins(scheduler.credentials)
        told = json.dumps({"address": scheduler.address, "keys": keys}).encode()
    world = dist.group.WORLD
    assert world is not None
    answer = json.loads(p2p.broadcast_bytes(told, 0, world))
    return scheduler, SchedulerAddress(answer["address"], msgspec.convert(answer["keys"], WorkerKeys))


class RunConnection(Protocol):
    """One worker's connection to the scheduler, in any kind of run."""

    client: SchedulerClient

    def explain(self, error: Exception, told_to_end: Callable[[], bool]) -> None:
        """Raise the cause of ``error``, if it is known: another worker may have failed before. ``told_to_end`` returns
        whether this process was told to end."""

    def plan(self, cuts: Sequence[PipelineCut], make: MakePlans) -> Sequence[Plan]:
        """Return the plans that ``make`` makes of ``cuts``, or of the cut that other pipelines of the run already have.
        Every worker must call it."""

    def fail(self, exception: BaseException) -> None:
        """Report that this worker ends with ``exception``."""

    def close(self) -> None:
        """Close the connection when the run has ended."""


class SchedulerConnection:
    """Connects this rank to the scheduler, which rank 0 starts if no standing one is given; every rank must do so.

    Args:
        incarnation: number of this run on these processes, which all ranks share.
        bind: returns the address at which a started scheduler listens.
        timeout: seconds that any answer of the scheduler may take.
        give_up: ends this process's wait for a tensor that will never come; called in another thread.
        log: file for the events and decisions of a scheduler that is started.

    Raises:
        SchedulerError: the scheduler does not answer, the keys do not fit, it speaks another version, or serves another
            run.
    """

    def __init__(
        self,
        mesh: Mesh,
        policy: PolicyConfig,
        incarnation: int,
        standing: SchedulerAddress | None,
        bind: Callable[[], str],
        timeout: float,
        give_up: Callable[[], None],
        log: Path | None = None,
    ) -> None:
        self._mesh = mesh
        self._worker = Worker(*mesh.locate(dist.get_rank()))
        self._scheduler, where = (None, standing) if standing else start_scheduler(policy, mesh, bind(), log)
        port = int(where.address.rpartition(":")[2])
        self._watchdog = Watchdog(self._describe, give_up, self._lose, self._stalls, lambda: self.client.limit, port)
        self._finishes = True
        self.client = SchedulerClient(
            where.address,
            self._worker,
            incarnation,
            mesh=(mesh.num_stages, mesh.num_pipelines, *(() if mesh.alike else mesh.depths)),
            timeout=timeout,
            credentials=where.keys,
            told=Callbacks(ends=self._must_end),
            host=Worker(*mesh.locate(0)) if standing is None else None,
        )
        try:
            self.client.greet()
            self.client.enrol(FIXED)
            self._watchdog.watch()
        except BaseException:
            self.client.close()
            raise

    def explain(self, error: Exception, told_to_end: Callable[[], bool]) -> None:
        """Raise an error that names the worker that failed first, and why: a worker that fails takes others down with
        it.

        Raises:
            WorkerFailedError: names the worker that failed first.
            SIGTERMException: this process was ``told_to_end`` too, and the other worker was faster.
        """
        failure = self.client.first_failure(timeout=2.0)
        if told_to_end() and (failure is None or failure.reason == ended_by(SIGTERMException())):
            raise SIGTERMException from error
        if failure is not None and failure.worker != self._worker:
            raise WorkerFailedError(self._describe(failure)) from error

    def plan(self, cuts: Sequence[PipelineCut], make: MakePlans) -> Sequence[Plan]:
        """Return the plans of ``cuts``: all pipelines have them from this process's rank 0."""
        return make(cuts)

    def fail(self, exception: BaseException) -> None:
        """Tell the other workers of ``exception``, unless it came from one of them. A lost connection or a missing
        message is reported: the scheduler knows best which worker failed first."""
        self._watchdog.disarm()
        alone = dist.is_initialized() and dist.get_world_size() == 1
        if not alone:
            keep_until_the_end(open_groups())
        self._finishes = False
        if not isinstance(exception, WorkerFailedError) or LOST_CONNECTION in str(exception):
            by_signal = ended_by(exception)
            self.client.failed(by_signal or f"{type(exception).__name__}: {exception}")
            if by_signal:  # a signal ends a process without a message
                print(f"{self._place(self._worker)} was {by_signal}.", file=sys.stderr, flush=True)
        if self._scheduler is not None and not alone:  # the others still have to hear of it
            job.at_end(self._scheduler.close)
            self._scheduler = None

    def close(self) -> None:
        self._watchdog.disarm()
        if self.client.stop is None:
            with suppress(SchedulerError, WorkerFailedError):  # all that had to be done is done
                self.client.depart(finished=self._finishes, timeout=_LAST_WORDS)
                if self._scheduler is not None:  # the others still have to depart
                    self.client.first_failure(_OTHERS_DEPART)
        self.client.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def _lose(self, reason: str) -> None:
        self.client.failed(reason)
        self._watchdog.arm(End(reason, run=True, worker=self._worker))

    def _stalls(self, awaits: tuple[str, ...]) -> None:
        self.client.stalls(awaits)

    def _must_end(self, end: End) -> None:
        if not end.run:
            self._watchdog.arm(msgspec.structs.replace(end, reason=f"it must end: {end.reason}", worker=self._worker))
        elif end.failed:
            self._watchdog.arm(end)

    def _describe(self, failure: End) -> str:
        first = "The scheduler" if failure.worker is None else self._place(failure.worker)
        return f"{first} failed first and ended the run: {failure.reason}"

    def _place(self, worker: Worker) -> str:
        rank = self._mesh.rank(worker.stage, worker.pipeline)
        return f"Stage {worker.stage} of pipeline {worker.pipeline} (rank {rank})"
