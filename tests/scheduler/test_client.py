"""Clients and a server over real sockets."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_sdpipe.errors import ConfigurationError, SchedulerError, WorkerFailedError
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler.client import Failure, SchedulerClient, ask_status
from lightning_sdpipe.scheduler.credentials import make_keys
from lightning_sdpipe.scheduler.server import Server
from tests.scheduler.live_scheduler import clients, serving

W = Worker


def test_a_group_reaches_all_its_members() -> None:
    with serving(AllReduceModels(), 2, 2) as server, clients(server.address, W(1, 0), W(1, 1)) as (a, b):
        for client in (a, b):
            client.join()
        for iteration in (5, 6):
            a.ready(iteration)
            b.ready(iteration)
            assert a.group() == b.group()
        for client in (a, b):
            client.leave()


def test_many_workers_train_for_a_while_and_leave_one_by_one() -> None:
    spec = SemiDecentralized(window=0.002, connectivity=3)
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
        serving(AllReduceModels(), 1, 3) as server,
        clients(server.address, W(0, 0), W(0, 1), W(0, 2)) as (a, b, c),
    ):
        for client in (a, b, c):
            client.join()
        a.ready(0)
        a._timeout = 0.5
        with pytest.raises(SchedulerError, match=r"iteration 0.*waits for \(stage 0, pipeline 1\), \(stage 0, p"):
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
        serving(AllReduceModels(), 1, 3) as server,
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
    with serving(AllReduceModels(), 1, 2) as server, clients(server.address, W(0, 0), W(0, 1)) as (a, b):
        with pytest.raises(SchedulerError, match=r"call ready\(\) first"):
            a.group()
        with pytest.raises(SchedulerError, match=r"call join\(\) first"):
            a.ready(0)
        a.join()
        b.join()
        a.ready(0)
        with pytest.raises(SchedulerError, match="before it fetched"):
            a.ready(1)
        b.ready(3)
        a.group()
        a.ready(0)
        b.group()
        b.ready(-1)
        with pytest.raises(SchedulerError, match=r"refused.*reported iteration -1 after 3"):
            b.group()


def test_a_silent_worker_is_treated_as_left_and_named_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    with (
        serving(AllReduceModels(), 1, 2, worker_timeout=1.0) as server,
        clients(server.address, W(0, 0), heartbeat=0.02) as (a,),
        clients(server.address, W(0, 1), heartbeat=1000.0) as (b,),
    ):
        a.join()
        b.join()
        a.ready(0)
        assert a.group().members == (W(0, 0),)
        assert "worker (stage 0, pipeline 1) was silent" in caplog.text
        states = {w.worker.pipeline: w.state for w in ask_status(server.address).workers}
        assert states == {0: "compute", 1: "lost"}
        a.leave()
        b.ready(0)  # it was only slow: it joins again by itself
        assert b.group().members == (W(0, 1),)


def test_heartbeats_keep_a_busy_worker_alive() -> None:
    with (
        serving(AllReduceModels(), 1, 2, worker_timeout=1.0) as server,
        clients(server.address, W(0, 0), W(0, 1), heartbeat=0.02) as (a, b),
    ):
        a.join()
        b.join()
        a.ready(0)
        a._timeout = 2.0
        with pytest.raises(SchedulerError, match=r"waits for \(stage 0, pipeline 1\)"):
            a.group()


def test_heartbeats_bring_the_news_of_a_failure() -> None:
    heard = threading.Event()

    class Listening(SchedulerClient):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "aborted" and value is not None:
                heard.set()

    with (
        serving(AllReduceModels(), 1, 2) as server,
        clients(server.address, W(0, 1)) as (b,),
    ):
        a = Listening(server.address, W(0, 0), heartbeat=0.02)
        try:
            a.join()
            b.join()
            b.failed("broke")
            assert heard.wait(10)
            assert a.aborted == Failure(W(0, 1), "broke")
        finally:
            a.close()


def test_a_passive_neighbour_is_invited_while_it_computes() -> None:
    invited: list[Group] = []
    arrived = threading.Event()

    def on_invitation(group: Group) -> None:
        invited.append(group)
        arrived.set()

    with (
        serving(ADPSGD(asynchronous=True), 1, 2) as server,
        clients(server.address, W(0, 0)) as (a,),
        clients(server.address, W(0, 1), on_invitation=on_invitation) as (b,),
    ):
        a.join()
        b.join()
        b.leave()
        b.join()  # the heartbeats' connection certainly exists once one was answered
        a.ready(0)
        group = a.group()
        assert group.passive == (W(0, 1),)
        b.leave()
        assert arrived.is_set()
        assert invited == [group], "leave() waits for the invitations that were sent"


def test_the_right_keys_are_let_in_and_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    ours, worker = make_keys()
    theirs, stranger = make_keys()
    with serving(AllReduceModels(), 1, 1, keys=ours) as server:
        with clients(server.address, W(0, 0), credentials=worker) as (a,):
            a.join()
            a.ready(0)
            assert a.group().members == (W(0, 0),)
            assert ask_status(server.address, credentials=worker).signals == 1
        mixed = type(worker)(stranger.public, stranger.secret, worker.scheduler_public)
        for credentials in (None, stranger, mixed, mixed):
            with (
                clients(server.address, W(0, 0), credentials=credentials, timeout=0.2) as (b,),
                pytest.raises(SchedulerError, match=r"does not answer|no connection"),
            ):
                b.join()
        assert server.service.status(0.0).signals == 1
    warnings = [record.getMessage() for record in caplog.records if "turned away" in record.getMessage()]
    assert warnings.count("a client at 127.0.0.1 without the right key was turned away (logged once)") == 1
    assert len(warnings) == len(set(warnings))
    assert theirs.secret not in repr((ours, theirs, worker, stranger))


def test_beyond_this_machine_keys_are_required() -> None:
    with pytest.raises(ConfigurationError, match="without keys"):
        Server(AllReduceModels(), 1, 1, "tcp://0.0.0.0:*")
    with pytest.raises(ConfigurationError, match=r"worker\.key"):
        SchedulerClient("tcp://10.0.0.1:5555", W(0, 0))
