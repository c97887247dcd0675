"""The shell around the rules: starts and buries processes, and forwards their output."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.scheduler.server.process import SchedulerProcess, reserve_port
from lightning_sdpipe.scheduler.server.stop_signals import stop_signals
from lightning_sdpipe.supervision import events
from lightning_sdpipe.supervision.children import Child, Keeper
from lightning_sdpipe.supervision.output import Log, OutputStream, Terminal, open_outputs
from lightning_sdpipe.supervision.rules import FAILED, Rules
from lightning_sdpipe.supervision.script import REPORT, UncaughtException, decode
from lightning_sdpipe.supervision.state import Settings
from lightning_sdpipe.supervision.status_poller import StatusPoller
from lightning_sdpipe.topology.mesh import Mesh

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LONGEST_WAIT = 60.0
_LONGEST_REPORT = 1 << 16
_GLANCE = 0.05  # seconds between checks whether a worker has written the policy


@dataclass
class _Rank:
    """A process of a pipeline, and the streams that it writes to."""

    pipeline: int
    rank: int
    child: Child
    streams: dict[int, OutputStream]
    report: int
    """Descriptor on which it reports the exception that has left its script."""
    raised: UncaughtException | None = None


@dataclass
class _Job:
    """A pipeline: its log, its port, and its running processes."""

    log: Log
    port: socket.socket | None = None
    ranks: dict[int, _Rank] = field(default_factory=dict)


def _heeded() -> list[signal.Signals]:
    """Return the signals that end the supervisor, without SIGHUP if it was started to outlive its terminal
    (`nohup`)."""
    return [number for number in _STOPS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


class Supervisor:
    """One run of ``sdpipe run``.

    Args:
        settings: settings of the rules.
        command: the command that every rank runs.
        environment: environment of every rank, without what tells it its rank.
        scheduler: the scheduler's process, not started yet.
        look: asks the scheduler for the state of the run; called in a thread with the time, which goes into the answer.
        logs: a directory that exists.
        terminal: gets the lines of the supervisor, and the leader's output.
    """

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str],
        environment: Mapping[str, str],
        scheduler: SchedulerProcess,
        look: Callable[[float], events.Seen],
        logs: Path,
        terminal: Terminal,
    ) -> None:
        self._mesh = mesh = Mesh.build(settings.num_stages, settings.num_stages)  # of each pipeline
        self._rules = Rules(settings, lambda rank: mesh.locate(rank)[0])
        self._command = [*command]
        self._environment = dict(environment)
        self._scheduler = scheduler
        self._look = look
        self._terminal = terminal
        self._jobs = {
            number: _Job(Log(logs / f"pipeline-{number}.log", terminal.say)) for number in range(settings.num_pipelines)
        }
        self._selector = selectors.DefaultSelector()
        self._events: deque[events.Event] = deque()
        self._keeper: Keeper | None = None
        self._shown = -1
        self._code: int | None = None

    def run(self) -> int:
        """Run until all processes have ended; return the exit code. Whatever is raised here, no process stays.

        Raises:
            SchedulerError: the scheduler does not start.
        """
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        looker = None
        try:
            with stop_signals(*_heeded(), signal.SIGCHLD, signal.SIGWINCH) as signals:
                for descriptor, name in ((signals, "signals"), (woken, "woken")):
                    self._selector.register(descriptor, selectors.EVENT_READ, name)
                self._keeper = Keeper()
                if self._scheduler.can_start:
                    self._scheduler.start()
                looker = StatusPoller(self._look, wake)
                self._events.append(events.Begin())
                while self._code is None:
                    self._turn(signals, woken, looker)
                return self._code
        finally:
            if looker is not None:
                looker.close()
            self._end_everything()
            if self._keeper is not None:
                self._keeper.close()
            self._selector.close()
            os.close(woken)
            os.close(wake)

    # -------------------------------------------------------------------- loop

    def _turn(self, signals: int, woken: int, looker: StatusPoller) -> None:
        now = time.monotonic()
        if not self._events:
            hurry = self._scheduler.begins or not self._scheduler.started
            wait = max(0.0, min(self._rules.deadline() - now, _GLANCE if hurry else _LONGEST_WAIT))
            for key, _ in self._selector.select(wait):
                if isinstance(key.data, OutputStream):
                    if not key.data.read():
                        self._selector.unregister(key.fd)
                elif isinstance(key.data, _Rank):
                    self._hear_report(key.data)
                elif key.fd == signals:
                    self._hear(os.read(signals, 4096))
                else:
                    os.read(woken, 4096)
                    answer = looker.answer()
                    if answer is not None and self._rules.asks:
                        self._events.append(answer)
            self._find_ended()
            starts = not self._scheduler.started and not self._scheduler.pid and self._scheduler.can_start
            if starts and self._rules.asks:
                self._scheduler.begin()
        event = self._events.popleft() if self._events else events.TimePassed()
        for decision in self._rules.on(event, time.monotonic()):
            self._carry_out(decision)

    def _hear(self, numbers: bytes) -> None:
        self._events.extend(events.SignalReceived(number) for number in numbers if number in _STOPS)
        size = self._terminal.size() if signal.SIGWINCH in numbers else None
        if size is not None:
            for job in self._jobs.values():
                for rank in job.ranks.values():
                    for stream in rank.streams.values():
                        stream.resize(size)

    def _find_ended(self) -> None:
        for job in self._jobs.values():
            for rank, process in list(job.ranks.items()):
                if process.child.has_ended():
                    del job.ranks[rank]
                    self._events.append(self._bury(process))
        if self._scheduler.begins:
            self._check_scheduler()
            return
        if self._scheduler.has_ended():
            self._events.append(events.SchedulerEnded(self._scheduler.bury()))

    def _bury(self, process: _Rank) -> events.ProcessEnded:
        code = process.child.bury()
        self._hear_report(process)
        self._close(process)
        return events.ProcessEnded(process.pipeline, process.rank, code, process.raised if code > 0 else None)

    def _hear_report(self, process: _Rank) -> None:
        try:
            said = os.read(process.report, _LONGEST_REPORT)
        except BlockingIOError:
            return
        self._forget(process.report)
        process.raised = process.raised or decode(said)
        if process.raised is not None and process.rank in self._jobs[process.pipeline].ranks:
            self._events.append(events.Raising(process.pipeline, process.rank, process.raised))

    def _close(self, process: _Rank) -> None:
        for stream in process.streams.values():
            self._forget(stream.source)
            stream.close()
        self._forget(process.report)
        os.close(process.report)

    def _forget(self, descriptor: int) -> None:
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    # --------------------------------------------------------------- decisions

    def _carry_out(self, decision: events.Decision) -> None:
        match decision:
            case events.Launch(number, again):
                self._launch(number, again)
            case events.Stop(number, which):
                for process in self._jobs[number].ranks.values():
                    process.child.signal(which)
            case events.Say(line):
                self._terminal.say(line)
            case events.Show(number):
                self._shown = number
            case events.LaunchScheduler():
                self._launch_scheduler()
            case events.Finish(code):
                self._code = code

    def _launch(self, number: int, again: int) -> None:
        job = self._jobs[number]
        if job.port is not None:
            job.port.close()
        job.port = reserve_port()
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        job.log.write("", f"--- {when} started{f' (restart {again})' if again else ''} ---".encode())
        for rank in range(self._mesh.num_stages):
            try:
                job.ranks[rank] = self._start(number, rank, job)
            except OSError as error:  # out of processes or memory, perhaps for a moment
                self._events.append(
                    events.ProcessEnded(number, rank, FAILED, UncaughtException("OSError", str(error), ""))
                )

    def _start(self, number: int, rank: int, job: _Job) -> _Rank:
        assert job.port is not None
        size = self._mesh.num_stages
        environment = self._environment | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(job.port.getsockname()[1]),
            "SDPIPE_PIPELINE": str(number),
            "SDPIPE_SCHEDULER": self._scheduler.address,
        }
        sources, ends = open_outputs(self._terminal if rank == 0 else None)
        prefix = f"[stage {self._mesh.locate(rank)[0]}] " if size > 1 else ""

        def shown() -> bool:
            return rank == 0 and self._shown == number

        streams = {
            descriptor: OutputStream(source, descriptor, job.log, prefix, self._terminal, shown)
            for descriptor, source in sources.items()
        }
        reading, report = os.pipe()
        os.set_blocking(reading, False)
        try:
            child = Child(self._command, environment | {REPORT: str(report)}, ends, [report], self._keeper)
        except OSError:
            for stream in streams.values():
                stream.close()
            os.close(reading)
            raise
        for stream in streams.values():
            self._selector.register(stream.source, selectors.EVENT_READ, stream)
        process = _Rank(number, rank, child, streams, reading)
        self._selector.register(reading, selectors.EVENT_READ, process)
        return process

    def _launch_scheduler(self) -> None:
        try:
            self._scheduler.begin()
        except SchedulerError as error:
            self._scheduler_failed(error)

    def _check_scheduler(self) -> None:
        """Check whether the scheduler listens by now; meanwhile the rest goes on."""
        try:
            self._scheduler.check()
        except SchedulerError as error:
            if not self._scheduler.started:  # it has never listened
                raise
            self._scheduler_failed(error)

    def _scheduler_failed(self, error: SchedulerError) -> None:
        self._terminal.say(str(error))
        self._events.append(events.SchedulerEnded(FAILED))

    def _end_everything(self) -> None:
        """End all that still runs: after the last decision only the scheduler, after an exception here perhaps
        everything."""
        for job in self._jobs.values():
            for process in job.ranks.values():
                process.child.signal(signal.SIGKILL)
            for process in job.ranks.values():
                process.child.bury()
                self._close(process)
            job.ranks.clear()
            if job.port is not None:
                job.port.close()
            job.log.close()
        self._scheduler.close()
