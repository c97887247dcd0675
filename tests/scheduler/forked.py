"""Schedulers of trainings that tests run, without the third of a second that a new process takes to import: one process
has imported what they need, and forks each of them.

What is special to the real start is for tests/scheduler/server/test_process.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from lightning_sdpipe.scheduler.server import process
from lightning_sdpipe.scheduler.server.process import START_TIMEOUT, SchedulerProcess, serve_parent

ROOT = Path(__file__).parents[2]
KEPT_APART = "SDPIPE_TEST_RUN"
"""In the environment of tests that look for all processes which a run has left: there, a scheduler is a new one."""
_LENGTH = 8  # bytes


class _Forked:
    """What subprocess.Popen would be, as far as :class:`SchedulerProcess` asks."""

    def __init__(self, path: str, environment: dict[str, str], stderr: int) -> None:
        read, self._in = os.pipe()
        self._out, write = os.pipe()
        self.returncode: int | None = None
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(path)
        wanted = json.dumps({"environment": environment, "directory": os.getcwd()}).encode()
        socket.send_fds(self._line, [len(wanted).to_bytes(_LENGTH, "big")], [read, write, stderr])
        self._line.sendall(wanted)
        os.close(read)
        os.close(write)
        self.stdin, self.stdout = os.fdopen(self._in, "wb", 0), os.fdopen(self._out, "rb", 0)
        self.pid = _number(self._line)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.001)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                self.returncode = _number(self._line)
            except TimeoutError:
                raise subprocess.TimeoutExpired("scheduler", timeout or 0.0) from None
            self._line.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _number(line: socket.socket) -> int:
    data = line.recv(_LENGTH, socket.MSG_WAITALL)
    if len(data) < _LENGTH:
        raise EOFError("what forks schedulers has ended")
    return int.from_bytes(data, "big", signed=True)


@contextmanager
def forked_schedulers() -> Iterator[type[SchedulerProcess]]:
    """A class in the place of :class:`SchedulerProcess`, for this process and its forks."""
    namespace = _network()
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/socket"
        command = [sys.executable, "-m", __name__, path]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": paths}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"ready\n"

            def fork(command: list[str], env: dict[str, str], stderr: int | None, **options: Any) -> _Forked:
                return _Forked(path, env, 2 if stderr is None else stderr)

            class ForkedScheduler(SchedulerProcess):
                def begin(self, timeout: float = START_TIMEOUT) -> None:
                    if KEPT_APART in os.environ or _network() != namespace:
                        super().begin(timeout)
                        return
                    with mock.patch.object(process.subprocess, "Popen", fork):
                        super().begin(timeout)

            try:
                yield ForkedScheduler
            finally:
                parent.terminate()


def _network() -> str:
    """The namespace of this thread."""
    return os.readlink("/proc/thread-self/ns/net")


# ----------------------------------------------------------------- what forks


def main(path: str) -> None:
    """Forks a scheduler for each connection, until standard input ends."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.set_blocking(reading, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal
    selector = selectors.DefaultSelector()
    for source in (listening.fileno(), reading, sys.stdin.fileno()):
        selector.register(source, selectors.EVENT_READ)
    lines: dict[int, socket.socket] = {}
    print("ready", flush=True)
    while True:
        ready = {key.fd for key, _ in selector.select()}
        if sys.stdin.fileno() in ready:
            return
        if reading in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(reading, 4096)
            _tell_ends(lines)
        if listening.fileno() in ready:
            line, _ = listening.accept()
            length, descriptors, _, _ = socket.recv_fds(line, _LENGTH, 3)
            wanted = json.loads(line.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                selector.close()
                for each in (listening, *lines.values(), line):
                    each.close()
                os.close(reading)
                os.close(writing)
                _serve(descriptors, **wanted)
            for descriptor in descriptors:
                os.close(descriptor)
            lines[child] = line
            line.sendall(child.to_bytes(_LENGTH, "big"))


def _tell_ends(lines: dict[int, socket.socket]) -> None:
    while lines:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            return
        with lines.pop(child) as line, contextlib.suppress(OSError):  # its run has ended, too
            line.sendall(os.waitstatus_to_exitcode(status).to_bytes(_LENGTH, "big", signed=True))


def _serve(descriptors: list[int], environment: dict[str, str], directory: str) -> NoReturn:
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        code = serve_parent()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
