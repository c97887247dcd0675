"""The scheduler as a child process."""

from __future__ import annotations

import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.policies import Reason, Worker
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler.client.client import Callbacks
from lightning_sdpipe.scheduler.client.wire import ask_status
from lightning_sdpipe.scheduler.credentials import make_keys
from lightning_sdpipe.scheduler.server.process import SchedulerProcess
from lightning_sdpipe.scheduler.server.server import Endpoint, Server
from tests.patience import limit, until
from tests.scheduler.live_scheduler import clients, serving

W = Worker


def test_a_port_in_use_is_one_clear_error() -> None:
    with serving(AllReduceModels(), 1, 1) as server:
        with pytest.raises(SchedulerError, match=f"{server.address}.*another program listens"):
            Server(AllReduceModels(), 1, 1, Endpoint(server.address)).open()
        with pytest.raises(SchedulerError, match=f"{server.address}.*another program listens"):
            SchedulerProcess.embedded(AllReduceModels(), 1, 1, server.address)


def test_the_embedded_scheduler_serves_and_ends() -> None:
    spec = SemiDecentralized(window=math.inf)
    with SchedulerProcess.embedded(spec, 1, 2) as scheduler:
        with clients(scheduler.address, W(0, 0), W(0, 1), credentials=scheduler.credentials, joins=True) as (a, b):
            a.ready(0)
            b.ready(0)
            assert a.group().reason == Reason.EVERYBODY_CAME
        scheduler.check()
        scheduler.signal(signal.SIGTERM)
        with pytest.raises(SchedulerError, match=r"the scheduler ended \(exit code 0\)"):
            until(scheduler.check)


def test_the_scheduler_has_room_for_more_connections_than_the_usual_limit_of_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        scheduler = SchedulerProcess.embedded(AllReduceModels(), 1, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with scheduler:
        ((now, most),) = re.findall(r"Max open files +(\S+) +(\S+)", Path(f"/proc/{scheduler.pid}/limits").read_text())
        assert now == most


def test_the_embedded_scheduler_starts_in_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    SchedulerProcess.embedded(AllReduceModels(), 1, 1).close()


def test_the_embedded_scheduler_ends_with_its_parent() -> None:
    parent = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os\n"
            "from lightning_sdpipe.scheduler.server.process import SchedulerProcess\n"
            "from lightning_sdpipe.policies.all_reduce import AllReduceModels\n"
            "scheduler = SchedulerProcess.embedded(AllReduceModels(), 1, 1)\n"
            "print(scheduler.pid, flush=True)\n"
            "os.kill(os.getpid(), 9)\n",
        ],
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    # The child holds the other end of this pipe's standard error only; wait for its own end by its pid.
    pid = int(parent.stdout)
    descriptor = os.pidfd_open(pid) if os.path.exists(f"/proc/{pid}") else None
    if descriptor is not None:
        poller = zmq.Poller()
        poller.register(descriptor, zmq.POLLIN)
        assert poller.poll(10_000), "the scheduler outlived its parent"
        os.close(descriptor)


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:*", "tcp://0.0.0.0:*"])
def test_an_embedded_scheduler_speaks_only_to_its_keys(bind: str) -> None:
    with SchedulerProcess.embedded(AllReduceModels(), 1, 1, bind) as scheduler:
        assert scheduler.credentials is not None
        with open(f"/proc/{scheduler.pid}/cmdline") as file:
            assert scheduler.credentials.scheduler_public not in file.read()
        address = scheduler.address.replace("0.0.0.0", "127.0.0.1")
        with clients(address, W(0, 0), credentials=scheduler.credentials, joins=True) as (a,):
            a.ready(0)
            a.group()
        for stranger in (None, make_keys()[1]):
            if stranger is not None or "127.0.0.1" in bind:
                with pytest.raises(SchedulerError, match=r"asks for a key|has another key|does not let this key in"):
                    ask_status(address, credentials=stranger)


@pytest.mark.parametrize(
    ("host", "whose"), [(None, "its process"), (W(0, 0), "its process, or that of the scheduler that it started,")]
)
def test_an_ordinary_run_ends_with_its_scheduler(host: Worker | None, whose: str) -> None:
    """Whether the process of a worker has started it, which may have ended, or another program."""
    over: list[bool] = []
    with SchedulerProcess.embedded(AllReduceModels(), 1, 2) as scheduler:
        told = Callbacks(ends=lambda _: over.append(True))
        with clients(
            scheduler.address, W(0, 1), credentials=scheduler.credentials, host=host, told=told, joins=True
        ) as (b,):
            while b.wire._lifeline is None:
                time.sleep(0.01)
            scheduler.signal(signal.SIGKILL)
            failure = b.first_failure(limit().total_seconds())
            assert failure is not None
            assert failure.worker == host
            assert (
                f"{whose} ended without a word; an ordinary run ends with its scheduler, an elastic" in failure.reason
            )
            until(lambda: over)  # said after the failure
