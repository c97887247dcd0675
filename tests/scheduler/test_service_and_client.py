"""Clients and a server over real sockets, and the embedded process."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import zmq

from lightning_sdpipe.errors import ConfigurationError, SchedulerError, WorkerFailedError
from lightning_sdpipe.scheduler import messages as m
from lightning_sdpipe.scheduler.client import Failure, SchedulerClient
from lightning_sdpipe.scheduler.policy import Reason, Worker
from lightning_sdpipe.scheduler.process import EmbeddedScheduler
from lightning_sdpipe.scheduler.server import Server
from lightning_sdpipe.scheduler.service import SchedulerService
from lightning_sdpipe.scheduler.specification import (
    AllReduceSpec,
    PolicySpec,
    SemiDecentralizedSpec,
    build,
    from_json,
    to_json,
)

W = Worker


@contextmanager
def serving(spec: PolicySpec, num_stages: int, num_pipelines: int) -> Iterator[Server]:
    """A server in a thread of this process."""
    stop, tell = os.pipe()
    with Server(build(spec, num_stages, num_pipelines)) as server:
        thread = threading.Thread(target=server.run, args=([stop],))
        thread.start()
        try:
            yield server
        finally:
            os.close(tell)
            thread.join(10)
            os.close(stop)
            assert not thread.is_alive()


@contextmanager
def clients(address: str, *workers: Worker, timeout: float = 20.0) -> Iterator[list[SchedulerClient]]:
    with ExitStack() as stack:
        made = []
        for worker in workers:
            client = SchedulerClient(address, worker, timeout=timeout)
            stack.callback(client.close)
            made.append(client)
        yield made


def test_a_group_reaches_all_its_members() -> None:
    with serving(AllReduceSpec(), 2, 2) as server, clients(server.address, W(1, 0), W(1, 1)) as (a, b):
        for client in (a, b):
            client.join()
        for iteration in (5, 6):
            a.ready(iteration)
            b.ready(iteration)
            assert a.group() == b.group()
        for client in (a, b):
            client.leave()


def test_many_workers_train_for_a_while_and_leave_one_by_one() -> None:
    spec = SemiDecentralizedSpec(window=0.002, connectivity=3)
    workers = [W(j, i) for j in range(2) for i in range(4)]
    with serving(spec, 2, 4) as server, clients(server.address, *workers) as made:
        for client in made:
            client.join()

        def train(client: SchedulerClient) -> list[int]:
            sequences = []
            for iteration in range(30 + client.worker.pipeline):
                client.ready(iteration)
                group = client.group()
                assert client.worker in group.members
                sequences.append(group.sequence)
            client.leave()
            return sequences

        with ThreadPoolExecutor(len(made)) as pool:
            for sequences in pool.map(train, made):
                assert sequences == sorted(set(sequences))


def test_a_timeout_names_whom_the_scheduler_waits_for() -> None:
    with (
        serving(AllReduceSpec(), 1, 3) as server,
        clients(server.address, W(0, 0), W(0, 1), W(0, 2), timeout=0.2) as (a, b, c),
    ):
        for client in (a, b, c):
            client.join()
        a.ready(0)
        with pytest.raises(
            SchedulerError, match=r"iteration 0.*waits for \(stage 0, pipeline 1\), \(stage 0, p"
        ):
            a.group()


def test_an_absent_scheduler_is_named_by_its_address() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
        with (
            clients(address, W(0, 0), timeout=0.1) as (client,),
            pytest.raises(SchedulerError, match=address),
        ):
            client.join()


def test_the_first_failure_reaches_everybody() -> None:
    with (
        serving(AllReduceSpec(), 1, 3) as server,
        clients(server.address, W(0, 0), W(0, 1), W(0, 2)) as (a, b, c),
    ):
        for client in (a, b, c):
            client.join()
        assert a.first_failure(5.0) is None
        a.ready(0)
        b.failed("out of memory")
        c.failed("lost its neighbour")
        with pytest.raises(WorkerFailedError, match=r"\(stage 0, pipeline 1\) failed first: out of memory"):
            a.group()
        for client in (a, b, c):
            assert client.first_failure(5.0) == Failure(W(0, 1), "out of memory")


def test_a_failure_told_to_nobody_does_not_block() -> None:
    with clients("tcp://127.0.0.1:9", W(0, 0)) as (client,):
        client.failed("nobody listens")
        assert client.first_failure(0.05) is None


def test_wrong_use_of_the_client_is_told_at_once() -> None:
    with serving(AllReduceSpec(), 1, 2) as server, clients(server.address, W(0, 0), W(0, 1)) as (a, _b):
        with pytest.raises(SchedulerError, match=r"call ready\(\) first"):
            a.group()
        a.ready(0)
        with pytest.raises(SchedulerError, match="before it fetched"):
            a.ready(1)
        with pytest.raises(SchedulerError, match="without having joined"):
            a.group()


def test_a_port_in_use_is_one_clear_error() -> None:
    with serving(AllReduceSpec(), 1, 1) as server:
        with pytest.raises(SchedulerError, match=f"{server.address}.*another program listens"):
            Server(build(AllReduceSpec(), 1, 1), server.address).open()
        with pytest.raises(SchedulerError, match=f"{server.address}.*another program listens"):
            EmbeddedScheduler.start(AllReduceSpec(), 1, 1, server.address)


def test_the_embedded_scheduler_serves_and_ends() -> None:
    spec = SemiDecentralizedSpec(window=math.inf)
    with EmbeddedScheduler.start(spec, 1, 2) as scheduler:
        with clients(scheduler.address, W(0, 0), W(0, 1)) as (a, b):
            for client in (a, b):
                client.join()
            a.ready(0)
            b.ready(0)
            assert a.group().reason is Reason.EVERYBODY_CAME
        assert scheduler.running
    assert not scheduler.running
    assert scheduler._process.returncode == 0


def test_the_embedded_scheduler_ends_with_its_parent() -> None:
    parent = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os\n"
            "from lightning_sdpipe.scheduler.process import EmbeddedScheduler\n"
            "from lightning_sdpipe.scheduler.specification import AllReduceSpec\n"
            "scheduler = EmbeddedScheduler.start(AllReduceSpec(), 1, 1)\n"
            "print(scheduler._process.pid, flush=True)\n"
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


def test_the_scheduler_needs_no_torch() -> None:
    code = (
        "import sys, lightning_sdpipe.scheduler.process, lightning_sdpipe.scheduler.server, "
        "lightning_sdpipe.scheduler.client\n"
        "heavy = {'torch', 'numpy', 'lightning'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "spec",
    [
        AllReduceSpec(),
        SemiDecentralizedSpec(),
        SemiDecentralizedSpec(window=math.inf, connectivity=None),
        SemiDecentralizedSpec(window=0.25, connectivity=3, min_group=3, max_group=4),
    ],
)
def test_a_policy_survives_json(spec: PolicySpec) -> None:
    assert from_json(to_json(spec)) == spec


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1.0}, r"window=-1.0.*from 0 to inf"),
        ({"window": math.nan}, "window=nan"),
        ({"window": "often"}, "window='often'"),
        ({"connectivity": 0}, "connectivity=0.*from 1"),
        ({"min_group": 0}, "min_group=0"),
        ({"max_group": 1}, "max_group=1"),
        ({"max_group": 2, "min_group": 3}, "at least min_group"),
        ({"max_group": 2, "window": math.inf}, "contradicts"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SemiDecentralizedSpec(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["{", '{"type": "no_such"}', '{"type": "semi_decentralized", "window": -1}', "[]"]
)
def test_a_policy_from_bad_json_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        from_json(text)


def ask(service: SchedulerService, request: m.Request, now: float = 0.0) -> list[tuple[bytes, m.Reply]]:
    frames = service.handle(m.routing_id(request.worker), m.encode(request), now)
    return [(identity, m.decode_reply(frame)) for identity, frame in frames]


def test_repeating_a_request_is_harmless() -> None:
    service = SchedulerService(build(AllReduceSpec(), 1, 2))
    a, b = W(0, 0), W(0, 1)
    for worker in (a, b, a):
        assert ask(service, m.Join(worker, 7, 1)) == [(m.routing_id(worker), m.Acknowledged(1))]
    assert ask(service, m.Ready(a, 7, 2, 0)) == []
    assert ask(service, m.Ready(a, 7, 3, 0)) == []
    answers = ask(service, m.Ready(b, 7, 2, 0))
    assert [identity for identity, _ in answers] == [b"0.0", b"0.1"]
    assert ask(service, m.Ready(a, 7, 4, 0)) == answers[:1], "the answer may have been lost"
    for _ in range(2):
        assert ask(service, m.Leave(a, 7, 5)) == [(b"0.0", m.Acknowledged(5))]


def test_a_restarted_worker_takes_the_place_of_the_old_one() -> None:
    service = SchedulerService(build(AllReduceSpec(), 1, 2))
    a, b = W(0, 0), W(0, 1)
    ask(service, m.Join(a, 7, 1))
    ask(service, m.Join(b, 7, 1))
    ask(service, m.Ready(a, 7, 2, 0))
    ((identity, reply),) = ask(service, m.Join(a, 8, 1))
    assert (identity, reply) == (b"0.0", m.Acknowledged(1))
    assert ask(service, m.Ready(b, 7, 2, 0)) == []
    assert len(ask(service, m.Ready(a, 8, 2, 0))) == 2


def test_frames_that_make_no_sense_change_nothing() -> None:
    service = SchedulerService(build(AllReduceSpec(), 1, 1))
    ask(service, m.Join(W(0, 0), 7, 1))
    ready = m.encode(m.Ready(W(0, 0), 7, 2, 0))
    for frame in (b"", b"\x01", b"\x02" + ready[1:], ready[:-1], ready + b"\x00", b"\x01" * 5000):
        assert service.handle(b"0.0", frame, 0.0) == []
    assert service.handle(b"0.1", ready, 0.0) == []
    assert service.refused == {"malformed": 6, "impersonating": 1}
    assert len(service.handle(b"0.0", ready, 0.0)) == 1
