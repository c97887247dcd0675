"""The scheduler of supervised pipelines: `sdpipe scheduler` as a child, at one address however often it is started.

Without a policy of its own it is started when a worker has said what it shall decide by; the address is known before.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.supervision.children import Child

START_TIMEOUT = 30.0
_SAYS = b"scheduler listens at "


class StandingScheduler:
    """Started by :meth:`start`, or :meth:`begin` and :meth:`check`; again by the same.

    Args:
        options: of ``sdpipe scheduler``, but where it binds.
        bind: where it listens, as for ZeroMQ; a port ``*`` is chosen here.
        environment: of the process.
        log: gets what it prints.
        policy_file: that a worker writes; None if ``options`` name a policy.

    Raises:
        SchedulerError: nobody can listen there.
    """

    def __init__(
        self, options: Sequence[str], bind: str, environment: dict[str, str], log: Path, policy_file: Path | None = None
    ) -> None:
        self._options = [*options]
        self._policy_file = policy_file
        if policy_file is not None:
            self._options += ["--policy-file", str(policy_file)]
        self._reserved: socket.socket | None = None
        self.address = bind
        if bind.startswith("tcp://") and bind.endswith(":*"):
            host = bind.removeprefix("tcp://").removesuffix(":*").strip("[]")
            try:
                self._reserved = reserve_port(host)
            except OSError as error:
                raise SchedulerError(f"the scheduler cannot listen at {bind} ({error.strerror})") from error
            self.address = f"{bind.removesuffix('*')}{self._reserved.getsockname()[1]}"
        self._environment = environment
        self._log = log
        self._reading: int | None = None
        self._before, self._until = 0, 0.0
        self.child: Child | None = None
        self.started = False
        """Has it ever listened?"""

    def close(self) -> None:
        """Others may have the port."""
        self._stop_reading()
        if self._reserved is not None:
            self._reserved.close()

    @property
    def can_start(self) -> bool:
        """Is it known what it decides by?"""
        return self._policy_file is None or self._policy_file.exists()

    def start(self) -> None:
        """Returns when it listens.

        Raises:
            SchedulerError: as :meth:`check`.
        """
        self.begin()
        while self.begins:
            time.sleep(0.01)
            self.check()

    def begin(self) -> None:
        """Starts the process, which :meth:`check` looks after until it listens.

        Raises:
            SchedulerError: there can be no process.
        """
        command = [sys.executable, "-m", "lightning_sdpipe.cli", "scheduler", *self._options, "--bind", self.address]
        reading, writing = os.pipe()
        log = self._open_log()
        self._before, self._until = os.fstat(log).st_size, time.monotonic() + START_TIMEOUT
        try:
            self.child = Child(command, self._environment, (writing, log))
        except OSError as error:
            os.close(reading)
            raise SchedulerError(f"the scheduler did not start: {error}") from error
        self._reading = reading

    @property
    def begins(self) -> bool:
        """Has it been started, and does not listen yet?"""
        return self._reading is not None

    def check(self) -> None:
        """Looks whether it listens by now; then it has ``started``.

        Raises:
            SchedulerError: it will not; what it says is in the log, and the end of it in the message.
        """
        if self._reading is None or self.child is None:
            return
        ready, _, _ = select.select([self._reading], [], [], 0.0)
        line = os.read(self._reading, 4096) if ready else b""  # it writes its line at once
        if line.startswith(_SAYS):
            self.started = True
            self._stop_reading()
            return
        ended = self.child.has_ended()
        if not (line or ended or time.monotonic() > self._until):
            return
        self._stop_reading()
        self.child.signal(9)
        self.child.bury()
        self.child = None
        said = self._said(self._before).removeprefix("sdpipe: ")
        why = said or ("it ended without a word" if ended else f"it did not listen within {START_TIMEOUT:g} s")
        raise SchedulerError(f"the scheduler did not start: {why}; {self._log} has what it printed")

    def _stop_reading(self) -> None:
        if self._reading is not None:
            os.close(self._reading)
            self._reading = None

    def _open_log(self) -> int:
        try:
            return os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:  # a full disk, perhaps; it serves without
            return os.open(os.devnull, os.O_WRONLY)

    def _said(self, before: int) -> str:
        """The last line that is in the log from there on."""
        try:
            return self._log.read_bytes()[before:].decode(errors="replace").strip().rpartition("\n")[2]
        except OSError:
            return ""


def reserve_port(host: str = "127.0.0.1") -> socket.socket:
    """A port that nobody else is given while this socket is open, and on which one who allows it may listen.

    torch's store and ZeroMQ allow it (SO_REUSEADDR); the system gives ports to others that nobody is bound to.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved
