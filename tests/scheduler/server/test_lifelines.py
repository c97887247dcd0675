"""The scheduler hears at once that a worker of an ordinary run has ended, by its closed connection."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.scheduler.client.client import Failure
from lightning_sdpipe.scheduler.client.connection import ask_status
from tests.scheduler.live_scheduler import clients, serving

A, B = Worker(0, 0), Worker(0, 1)
JOINS = (
    "import sys, time\n"
    "from lightning_sdpipe.policies import Worker\n"
    "from lightning_sdpipe.scheduler.client.client import SchedulerClient\n"
    "client = SchedulerClient(sys.argv[1], Worker(0, 1), heartbeat=0.1)\n"
    "client.join()\n"
    "print(flush=True)\n"
    "time.sleep(60)\n"
)


@contextmanager
def joined(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own, which has joined as B."""
    process = subprocess.Popen([sys.executable, "-c", JOINS, address], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process
        process.stdout.close()
    finally:
        process.kill()
        process.wait()


def wait(holds: Callable[[], object], seconds: float = 10.0) -> float:
    """Seconds until that holds."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < seconds
        time.sleep(0.005)
    return time.monotonic() - start


@pytest.mark.parametrize("restarted", [False, True])
def test_a_killed_worker_is_named_at_once_and_a_stopped_one_is_not(restarted: bool) -> None:
    heard: list[Failure] = []
    with ExitStack() as stack:
        with serving(NoSync(), 1, 2) as server:
            address, beat = server.address, 0.1 if restarted else 5.0
            (a,) = stack.enter_context(clients(address, A, heartbeat=beat, on_abort=heard.append))
            a.join()
            b = stack.enter_context(joined(address))
            if not restarted:
                kill_and_look(b.pid, address, heard)
                return
        with serving(NoSync(), 1, 2, bind=address) as again:
            wait(lambda: len(again.service.groups.sessions.active_in(0)) == 2)
            kill_and_look(b.pid, address, heard)


def kill_and_look(pid: int, address: str, heard: list[Failure]) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)
    assert ask_status(address).failure is None
    os.kill(pid, signal.SIGKILL)
    assert wait(lambda: heard) < 0.5
    assert heard == [Failure(B, "its process ended without a word (its connection closed)")]
    assert ask_status(address).failure == str(heard[0])


def test_a_client_that_is_closed_is_no_failure() -> None:
    with serving(NoSync(), 1, 2) as server, clients(server.address, A) as (a,):
        a.join()
        for _ in range(2):
            with clients(server.address, B) as (b,):
                b.join()
                assert b._lifeline is not None
        time.sleep(0.2)
        assert a.first_failure(5.0) is None
        assert server.service.failure is None
