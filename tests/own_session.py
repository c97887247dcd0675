"""Run a user's script in a fork of this process, which has imported everything, in a session of its own."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig

from lightning_sdpipe import openmp
from lightning_sdpipe.worker.launching import job
from tests.patience import explained, limit


@dataclass(frozen=True)
class Script:
    """A script that runs. ``process`` leads a session, and all processes that it starts stay in it."""

    process: BaseProcess
    output: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def printed(self) -> str:
        return self.output.read_text()

    def wait(self) -> int:
        """Wait for the end and return the exit code, as multiprocessing has it: negative if a signal was the cause."""
        with explained(self.printed):
            self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode

    def ends(self, code: int) -> str:
        """Assert that it ends with this code, and leaves no process behind; return what it has printed."""
        assert self.wait() == code, self.printed()
        assert self.left() == []
        return self.printed()

    def left(self, seconds: float = 5) -> list[str]:
        """Return the commands of the processes of the session that do not end soon."""
        deadline = time.monotonic() + limit(seconds).total_seconds()
        while (found := [command for _, command in self._members()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def end(self) -> None:
        for pid, _ in self._members():
            os.kill(pid, signal.SIGKILL)
        self.process.join()

    def _members(self) -> list[tuple[int, str]]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
                command = (process / "cmdline").read_text().replace("\0", " ")
            except OSError:  # ended meanwhile
                continue
            if int(session) == self.pid and state != "Z":
                found.append((int(process.name), command))
        return found


@contextmanager
def script(directory: Path, main: Callable[..., Any], *arguments: Any) -> Iterator[Script]:
    directory.mkdir(exist_ok=True)
    output = directory / "printed.txt"
    output.touch()
    process = multiprocessing.get_context("fork").Process(target=_lead, args=(output, main, arguments))
    openmp.end_threads()
    process.start()
    running = Script(process, output)
    try:
        yield running
    finally:
        running.end()


@contextmanager
def scripts(directory: Path, *works: tuple[Any, ...]) -> Iterator[list[Script]]:
    """One for each main function with its arguments, in directories with the numbers of their places."""
    with ExitStack() as stack:
        yield [stack.enter_context(script(directory / str(place), *work)) for place, work in enumerate(works)]


def torchrun_of(nodes: int, rank: int, address: str, port: int, each: int = 1) -> LaunchConfig:
    """What torchrun does for one of ``nodes``, with workers that are copies of this process instead of new ones."""
    configs = {"rank": rank, "timeout": 120}
    endpoint = {"rdzv_backend": "static", "rdzv_endpoint": f"{address}:{port}", "rdzv_configs": configs}
    return LaunchConfig(nodes, nodes, each, run_id="tests", max_restarts=0, start_method="fork", **endpoint)


def _lead(output: Path, main: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job has ignored
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:  # made when this was another process
                handler.setStream(sys.stderr)
    atexit._clear()  # those of the process that this one is a copy of
    atexit.register(job.end)  # as importing the package does
    try:
        main(*arguments)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def module(name: str, *arguments: str) -> None:
    """Do what ``python -m name arguments...`` does, as the main function of a :func:`script`."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
