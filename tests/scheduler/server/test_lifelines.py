"""The scheduler hears at once that a worker of an ordinary run has ended, by its closed connection."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

import zmq

from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.scheduler.client.wire import Callbacks, Lifeline, ask_status
from lightning_sdpipe.scheduler.membership_protocol import End
from lightning_sdpipe.scheduler.server.lifelines import Lifelines, Lines
from recipes.harness import namespaces
from tests.namespaces import hosts
from tests.patience import until
from tests.scheduler.live_scheduler import clients, serving

A, B = Worker(0, 0), Worker(0, 1)
JOINS = (
    "import sys, time\n"
    "from lightning_sdpipe.policies import Worker\n"
    "from tests.scheduler.live_scheduler import OrdinaryClient\n"
    "client = OrdinaryClient(sys.argv[1], Worker(0, 1), 7)\n"
    "client.join()\n"
    "print(flush=True)\n"
    "time.sleep(3600)\n"
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


def test_they_end_although_a_fork_of_the_process_lives_on() -> None:
    with serving(NoSync(), 1, 2):
        fork = get_context("fork").Process(target=time.sleep, args=(3600,), daemon=True)
        fork.start()
    fork.kill()
    fork.join()


def test_a_killed_worker_is_named_at_once_and_a_stopped_one_is_not() -> None:
    heard: list[str] = []

    def over(end: End) -> None:
        assert end.failed
        heard.append(end.reason)

    with serving(NoSync(), 1, 2) as server, clients(server.address, A, told=Callbacks(ends=over)) as (a,):
        a.join()
        with joined(server.address) as b:
            os.kill(b.pid, signal.SIGSTOP)
            time.sleep(0.5)
            assert ask_status(server.address).failure is None
            os.kill(b.pid, signal.SIGKILL)
            until(lambda: heard)
            assert heard == ["its process ended (its connection closed)"]
            assert ask_status(server.address).failure == f"worker {B} failed first: {heard[0]}"


def test_the_kernel_answers_for_a_process_that_is_stopped_and_not_for_one_that_is_gone() -> None:
    """As for one in which a long call holds the GIL; the run goes on waiting for it."""
    with (
        serving(NoSync(), 1, 2, worker_timeout=2.0) as server,
        clients(server.address, A) as (a,),
        joined(server.address) as b,
    ):
        a.join()
        presence = server.service.members._presence
        os.kill(b.pid, signal.SIGSTOP)
        until(lambda: B in presence._silence.lost)
        incarnation = presence.incarnations[B]
        assert presence.lines.answers(B, incarnation, 2.0)
        assert not presence.lines.answers(B, incarnation + 1, 2.0)
        assert presence.out_of_reach(0.0, {}) is None
        os.kill(b.pid, signal.SIGKILL)
        until(lambda: not presence.lines.answers(B, incarnation, 2.0))


Made = TypeVar("Made")


def within(host: str, make: Callable[[], Made]) -> Made:
    """What ``make`` returns in that namespace."""

    def enter_and_make() -> Made:
        namespaces.enter(host)
        return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter_and_make).result()


def test_a_machine_that_cannot_be_reached_does_not_answer_and_may_come_back() -> None:
    lines = Lines()
    nonce = lines.give(B, 7)
    address = namespaces.address(0)
    with (
        hosts(2) as (here, there),
        zmq.Context() as context,
        within(here, lambda: Lifelines(context, address, 0, "inproc://nobody", b"lines", lines, 8.0)) as server,
    ):
        line = within(there, lambda: Lifeline(f"tcp://{address}:1", server.port, nonce))
        for plugged in (True, False, True):
            namespaces.plug(1, on=plugged)
            until(lambda plugged=plugged: lines.answers(B, 7, 3.0) == plugged)
        line.close()
