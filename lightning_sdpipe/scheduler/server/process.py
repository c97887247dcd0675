"""The scheduler as a child process, so that it takes no time from the training of its parent.

Its settings, keys included, go to the child's standard input as one line of JSON, never on the command line. One line
comes back: the address it listens at, or why it does not. The child ends when its standard input does, so it never
outlives its parent, however that ends. It is restarted at the address that it had.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from lightning_sdpipe.errors import ConfigurationError, SchedulerError, check_number, os_errors_as
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler import policy_file, run_file
from lightning_sdpipe.scheduler.credentials import WorkerKeys, host_and_port, make_keys
from lightning_sdpipe.scheduler.server.server import LOOPBACK, NO_FILES, WORKER_TIMEOUT, Endpoint, Files, Server
from lightning_sdpipe.scheduler.server.stop_signals import stop_signals

START_TIMEOUT = 30.0
STOP_TIMEOUT = 5.0
SAYS = "scheduler listens at "
"""Beginning of the line in which a started scheduler gives its address."""


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a scheduler, for ``sdpipe scheduler``, ``sdpipe run`` and rank 0 alike.

    The policy is given by its values, or by a file that a worker writes.
    """

    num_stages: int
    num_pipelines: int
    policy: dict[str, Any] | None = None
    policy_file: Path | None = None
    endpoint: Endpoint = LOOPBACK
    worker_timeout: float = WORKER_TIMEOUT
    files: Files = NO_FILES
    elastic: ElasticConfig | None = None
    path: tuple[str, ...] = ()
    """Folders in which modules of the user are found."""
    level: int = logging.INFO
    worker_keys: WorkerKeys | None = None
    """Keys for commands that find the scheduler by its :mod:`~lightning_sdpipe.scheduler.run_file`."""
    script: str = ""
    """Name of the script that trains, if the scheduler is a child of its run."""

    def __post_init__(self) -> None:
        check_number("worker_timeout", self.worker_timeout, "seconds above 0", above=0)

    def server(self) -> Server:
        """Return a server with these settings, not open yet.

        Raises:
            ConfigurationError: there is no such policy, or it cannot serve so many workers.
        """
        sys.path += [folder for folder in self.path if folder not in sys.path]
        by_file = None if self.policy_file is None else policy_file.read(self.policy_file)
        return Server(
            by_file or registry.from_plain(self.policy),
            self.num_stages,
            self.num_pipelines,
            self.endpoint,
            worker_timeout=self.worker_timeout,
            files=self.files,
            elastic=self.elastic,
        )

    def to_line(self) -> bytes:
        """Encode the settings as :meth:`from_line` reads them."""
        return msgspec.json.encode(self, enc_hook=str) + b"\n"

    def run_file(self, address: str) -> run_file.RunFile:
        """Return what commands must know of the scheduler with these settings that listens at ``address``."""
        log = None if self.files.log is None else str(self.files.log.absolute())
        time = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        pid = os.getppid() if self.script else os.getpid()
        return run_file.RunFile(
            address, self.worker_keys, log, self.num_stages, self.num_pipelines, time, self.script, pid, os.getcwd()
        )

    @staticmethod
    def from_line(line: bytes) -> SchedulerSettings:
        """Decode settings; the inverse of :meth:`to_line`."""
        return msgspec.json.decode(line, type=SchedulerSettings, dec_hook=lambda kind, value: kind(value))


class FirstLine:
    """Reads from ``descriptor`` up to the end of the first line.

    It reads byte by byte, since what follows may be for another reader, and a buffer would hide the end.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._line = b""
        self._poll = select.poll()  # unlike select(), it takes any descriptor
        self._poll.register(descriptor, select.POLLIN | select.POLLHUP)

    def read(self, timeout: float | None = None) -> bytes | None:
        """Return the line, or None if it is not complete after ``timeout`` seconds (None waits for it).

        Raises:
            EOFError: the input ended before the line did.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not self._line.endswith(b"\n"):
            if not self._poll.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000):
                return None
            byte = os.read(self._descriptor, 1)
            if not byte:
                raise EOFError
            self._line += byte
        return self._line


class SchedulerProcess:
    """A child process with a scheduler. :meth:`start`, or :meth:`begin` and :meth:`check`, start or restart it;
    :meth:`close` ends it.

    Args:
        settings: those of the scheduler.
        log: gets what the process prints; None for this process's standard error.
        environment: that of the process.
        keeps_port: True to choose the address here, so that it is known before the process is started.

    Raises:
        SchedulerError: the address is not available.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        log: Path | None = None,
        environment: Mapping[str, str] = os.environ,
        keeps_port: bool = False,
    ) -> None:
        self.address = bind = settings.endpoint.bind
        self.started = False
        """True if the scheduler has ever listened."""
        self._settings = settings
        self._log = log
        self._environment = {**environment, "PYTHONPATH": _python_path(environment)}
        self._reserved: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._first: FirstLine | None = None
        self._until = 0.0
        host, port = host_and_port(bind)
        if keeps_port and bind.startswith("tcp://") and port == "*":
            with os_errors_as(f"the scheduler cannot listen at {bind}", kind=SchedulerError):
                self._reserved = reserve_port(host)
            self.address = f"{bind.removesuffix('*')}{self._reserved.getsockname()[1]}"

    @classmethod
    def embedded(
        cls,
        policy: PolicyConfig,
        num_stages: int,
        num_pipelines: int,
        bind: str = "tcp://127.0.0.1:*",
        *,
        log: Path | None = None,
        depths: tuple[int, ...] = (),
    ) -> SchedulerProcess:
        """Start the scheduler of one run, with fresh keys; return when it listens. ``depths`` are the stages of each
        pipeline, if they differ; ``num_stages`` is then the largest of them.

        It imports a policy of the user's own from where this process would.
        """
        registry.build(policy, num_stages, num_pipelines, depths)  # refuse here what the child would refuse
        keys, worker_keys = make_keys()
        settings = SchedulerSettings(
            num_stages,
            num_pipelines,
            registry.to_plain(policy),
            endpoint=Endpoint(bind, keys),
            files=Files(None if log is None else log.resolve()),
            path=tuple(os.path.abspath(folder) for folder in sys.path),  # "" is the working directory
            elastic=ElasticConfig.of_fixed(num_pipelines, depths=depths) if depths else None,
            level=logging.WARNING,
            worker_keys=worker_keys,
            script=sys.argv[0] or "python",
        )
        scheduler = cls(settings)
        scheduler.start()
        return scheduler

    # ------------------------------------------------------------------- looks

    @property
    def credentials(self) -> WorkerKeys | None:
        """Keys that clients need besides the address."""
        return self._settings.worker_keys

    @property
    def can_start(self) -> bool:
        """True if the policy is known."""
        return self._settings.policy_file is None or self._settings.policy_file.exists()

    @property
    def pid(self) -> int:
        """Process number of the child; 0 if there is none."""
        return 0 if self._process is None else self._process.pid

    # ---------------------------------------------------------------- starting

    def start(self, timeout: float = START_TIMEOUT) -> None:
        """Start the process, and return when it listens.

        Raises:
            SchedulerError: as :meth:`check`.
        """
        self.begin(timeout)
        try:
            while self._first is not None:
                self.check(timeout)
        except BaseException:
            self.bury()
            raise

    def begin(self, timeout: float = START_TIMEOUT) -> None:
        """Start the process; :meth:`check` waits until it listens.

        Raises:
            SchedulerError: the process cannot be started.
        """
        self._until = time.monotonic() + timeout
        endpoint = replace(self._settings.endpoint, bind=self.address)
        log = None if self._log is None else _open_log(self._log)
        try:
            with os_errors_as("the scheduler did not start", kind=SchedulerError):
                self._process = process = subprocess.Popen(
                    [sys.executable, "-m", "lightning_sdpipe.scheduler"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,  # poll() must see what is left unread
                    env=self._environment,
                    start_new_session=True,  # Ctrl-C in a terminal does not reach it: all others end before it
                )
        finally:
            if log is not None:
                os.close(log)
        assert process.stdin is not None
        assert process.stdout is not None
        self._first = FirstLine(process.stdout.fileno())
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which check() reports
            process.stdin.write(msgspec.structs.replace(self._settings, endpoint=endpoint).to_line())
            process.stdin.flush()

    def check(self, timeout: float = 0.0) -> None:
        """Wait for ``timeout`` seconds for the process to listen; then it has ``started``.

        Raises:
            SchedulerError: the process will not listen, and the message has what it said; or it has ended since.
        """
        if self._first is None:
            if self._process is not None and self._process.poll() is not None:
                code = self.bury()
                ended = "killed" if code == -signal.SIGKILL else f"exit code {code}"
                raise SchedulerError(f"the scheduler ended ({ended})")
            return
        left = self._until - time.monotonic()
        try:
            line = self._first.read(max(0.0, min(timeout, left)))
        except EOFError:
            why = "it ended without a word"
        else:
            if line is None and left > 0:
                return
            if line is None:
                why = "it did not listen in time; the machine may be overloaded: try again"
            elif line.startswith(SAYS.encode()):
                self.address = line.decode().removeprefix(SAYS).strip()
                self.started, self._first = True, None
                return
            else:
                why = line.decode().strip()
        self.bury()
        printed = "what it printed is above" if self._log is None else f"{self._log} has what it printed"
        raise SchedulerError(f"the scheduler did not start: {why}; {printed}")

    # ------------------------------------------------------------------ ending

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it has not ended."""
        if self._process is not None:
            self._process.send_signal(number)

    def bury(self) -> int:
        """Kill the process if it has not ended; return its exit code, or −1 times the signal."""
        if self._process is None:
            return 0
        process, self._process, self._first = self._process, None, None
        process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return code

    def close(self) -> None:
        """End the process, and wait for it; other programs may then have its port. Safe to call twice."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT)
        self.bury()
        if self._reserved is not None:
            self._reserved.close()

    def __enter__(self) -> SchedulerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    settings: SchedulerSettings, signals: Sequence[signal.Signals], stop: Sequence[int], say: Callable[[str], object]
) -> None:
    """Serve until one of the ``signals`` comes or one of the descriptors ``stop`` ends; ``say`` gets the first line.

    Raises:
        ConfigurationError: the settings cannot be served.
        SchedulerError: the scheduler cannot listen.
    """
    of_a_run = settings.level >= logging.WARNING  # says little, amid what the run's ranks print
    form = "scheduler: %(message)s" if of_a_run else "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=settings.level, format=form, stream=sys.stderr)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # not 1024: a worker takes three, and each stranger one
    server = settings.server()
    with stop_signals(*signals) as stopped, server, run_file.published(settings.run_file(server.address)):
        say(SAYS + server.address)
        server.run([stopped, *stop])


def serve_parent() -> int:
    """Serve as the child process until standard input ends; return the exit code."""
    # The parent reads only the first line of standard output; what a user's policy prints goes where errors do.
    answers, parent = os.dup(sys.stdout.fileno()), sys.stdin.fileno()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(line: str) -> None:
        os.write(answers, " ".join(line.split("\n")).encode() + b"\n")

    try:
        line = FirstLine(parent).read()
        assert line is not None
        serve(SchedulerSettings.from_line(line), [signal.SIGTERM], [parent], say)
    except EOFError:
        say("it got no settings, since it is started by the training; by hand, use `sdpipe scheduler`")
        return 2
    except (ConfigurationError, SchedulerError) as error:
        say(str(error))
        return 2
    return 0


def reserve_port(host: str = "127.0.0.1") -> socket.socket:
    """Return a socket whose port no other program is given while it is open, but on which the scheduler may listen.

    torch's store and ZeroMQ set SO_REUSEADDR and may listen there; the system gives other programs only unbound ports.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def _open_log(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:  # a full disk, perhaps; the scheduler serves without a log
        return os.open(os.devnull, os.O_WRONLY)


def _python_path(environment: Mapping[str, str]) -> str:
    """Return the Python path on which the child finds this package, whatever the working directory is by now."""
    here = str(Path(__file__).resolve().parents[3])
    return os.pathsep.join([here, *filter(None, [environment.get("PYTHONPATH")])])
