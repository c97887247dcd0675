"""The shell around the rules: starts and buries processes, and logs their output."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.scheduler.server.process import SchedulerProcess, reserve_port
from lightning_sdpipe.scheduler.server.stop_signals import stop_signals
from lightning_sdpipe.supervision import rules
from lightning_sdpipe.supervision.children import Children, has_ended, stop
from lightning_sdpipe.supervision.output import Log, Output, Terminal
from lightning_sdpipe.topology.mesh import Mesh

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TICK = 0.1
_LONGEST_QUOTE = 300
_PERIOD = 0.25
"""Seconds between two questions to the scheduler."""


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
        settings: rules.Settings,
        command: Sequence[str],
        environment: Mapping[str, str],
        scheduler: SchedulerProcess,
        look: Callable[[float], rules.Seen],
        logs: Path,
        terminal: Terminal,
    ) -> None:
        self._mesh = Mesh.build(settings.num_stages, settings.num_stages)  # of each pipeline
        self._rules = rules.Rules(settings)
        self._command, self._environment = command, {**environment}
        self._scheduler, self._scheduler_is_due = scheduler, True
        self._look, self._terminal = look, terminal
        self._log = Log(logs / "supervisor.log", terminal.say)
        self._logs = [Log(logs / f"pipeline-{n}.log", self._say) for n in range(settings.num_pipelines)]
        self._ports: dict[int, socket.socket] = {}
        self._ranks: dict[tuple[int, int], tuple[subprocess.Popen[bytes], Output]] = {}
        """Running processes, by pipeline and stage, with what they print."""
        self._events: deque[rules.Event] = deque()
        self._asked: Future[rules.Seen] | None = None
        self._ask_at = 0.0

    def run(self) -> int:
        """Run until all processes have ended; return the exit code. No process is left, whatever is raised here.

        Raises:
            SchedulerError: the scheduler does not start.
        """
        heeded = [one for one in _STOPS if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]  # nohup
        self._selector = selectors.DefaultSelector()
        self._children = Children()
        thread = ThreadPoolExecutor(1)
        try:
            with stop_signals(*heeded, signal.SIGCHLD) as signals:
                self._selector.register(signals, selectors.EVENT_READ)
                while self._rules.code is None:
                    self._turn(signals, thread)
                return self._rules.code
        finally:
            self._end_everything()
            thread.shutdown()

    # -------------------------------------------------------------------- loop

    def _turn(self, signals: int, thread: ThreadPoolExecutor) -> None:
        for key, _ in self._selector.select(0.0 if self._events else _TICK):
            if key.fd == signals:
                heard = os.read(signals, 4096)
                self._events.extend(rules.SignalReceived(number) for number in heard if number in _STOPS)
            elif key.data.read() is False:
                self._selector.unregister(key.fd)
        seen = self._ask(thread)
        for place, (process, _) in list(self._ranks.items()):
            if has_ended(process):
                self._events.append(self._bury(*place))
        if seen is not None:  # after the ends of processes, which explain it
            self._events.append(seen)
        self._tend_scheduler()
        for decision in self._rules.on(self._events.popleft() if self._events else None, time.monotonic()):
            self._carry_out(decision)

    def _ask(self, thread: ThreadPoolExecutor) -> rules.Seen | None:
        """Return an answer of the scheduler, if one has come; it may take seconds, and nothing else waits for it."""
        seen, now = None, time.monotonic()
        if self._asked is not None and self._asked.done():
            with contextlib.suppress(SchedulerError):  # it may be starting again
                seen = self._asked.result()
            self._asked = None
        if self._asked is None and now >= self._ask_at:
            self._asked, self._ask_at = thread.submit(self._look, now), now + _PERIOD
        return seen

    def _tend_scheduler(self) -> None:
        """Start the scheduler if it is due, and see how it is; it may take seconds to listen, and nothing else waits
        for it."""
        try:
            if self._scheduler_is_due and self._scheduler.can_start and not self._rules.ends:
                self._scheduler_is_due = False
                self._scheduler.begin()
            self._scheduler.check()
        except SchedulerError as error:
            if not self._scheduler.started:  # it has never listened
                raise
            self._events.append(rules.ProcessEnded(None, 0, rules.FAILED, str(error)))

    # --------------------------------------------------------------- decisions

    def _carry_out(self, decision: rules.Decision) -> None:
        match decision:
            case rules.Launch(None, _):
                self._scheduler_is_due = True
            case rules.Launch(int(number), again):
                self._launch(number, again)
            case rules.Stop(pipeline, which):
                for (number, _), (process, _) in self._ranks.items():
                    if number == pipeline:
                        stop(process, which)
            case rules.Say(line):
                self._say(line)

    def _launch(self, number: int, again: int) -> None:
        if number in self._ports:
            self._ports[number].close()
        self._ports[number] = reserve_port()
        restart = f" (restart {again})" if again else ""
        self._logs[number].write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} started{restart} ---".encode())
        size, started = self._mesh.num_stages, []
        for rank in range(size):
            environment = self._environment | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._ports[number].getsockname()[1]),
                "SDPIPE_PIPELINE": str(number),
                "SDPIPE_SCHEDULER": self._scheduler.address,
            }
            stage, _ = self._mesh.locate(rank)
            show = partial(self._show, number) if rank == 0 else lambda data: None
            source, end = os.pipe()
            output = Output(source, self._logs[number], f"[stage {stage}] ".encode() if size > 1 else b"", show)
            try:
                process = self._children.start(self._command, environment, end)
            except OSError as error:  # out of processes or memory, perhaps for a moment
                output.close()
                self._events.append(rules.ProcessEnded(number, stage, rules.FAILED, str(error)))
            else:
                started.append(process.pid)
                self._ranks[number, stage] = process, output
                self._selector.register(source, selectors.EVENT_READ, output)
        if len(started) == size:
            processes = "process" if size == 1 else "processes, the last stage first,"
            self._say(f"pipeline {number} is {processes} {', '.join(map(str, started))}{restart}")

    def _show(self, number: int, data: bytes) -> None:
        if number == self._rules.shown:
            self._terminal.show(data)

    def _say(self, line: str) -> None:
        self._log.write(time.strftime("%Y-%m-%d %H:%M:%S ").encode() + line.encode())
        self._terminal.say(line)

    # --------------------------------------------------------------------- end

    def _bury(self, number: int, stage: int) -> rules.ProcessEnded:
        process, output = self._ranks.pop((number, stage))
        code = self._children.bury(process)
        if output.source in self._selector.get_map():
            self._selector.unregister(output.source)
        output.close()
        return rules.ProcessEnded(number, stage, code, output.last.decode(errors="replace")[:_LONGEST_QUOTE])

    def _end_everything(self) -> None:
        """End all that still runs: after the last decision only the scheduler, after an exception here perhaps
        everything."""
        for place in list(self._ranks):
            self._bury(*place)
        self._children.close()
        self._scheduler.close()
        for port in self._ports.values():
            port.close()
        for log in (*self._logs, self._log):
            log.close()
        self._selector.close()
