"""Clients and a server over real sockets."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from functools import partial
from unittest import mock

import msgspec
import pytest
import zmq

from lightning_sdpipe.errors import ConfigurationError, SchedulerError, WorkerFailedError
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import conversation
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.scheduler.client.wire import TRIES, ask_status
from lightning_sdpipe.scheduler.credentials import make_keys
from lightning_sdpipe.scheduler.rows import About, Chunk
from lightning_sdpipe.scheduler.server.server import Endpoint
from tests.patience import limit, until
from tests.scheduler.live_scheduler import clients, serving

W = Worker


def test_a_group_reaches_all_its_members() -> None:
    with serving(AllReduceModels(), 2, 2) as server, clients(server.address, W(1, 0), W(1, 1), joins=True) as (a, b):
        for iteration in (5, 6):
            a.ready(iteration)
            b.ready(iteration)
            assert a.group() == b.group()
        for client in (a, b):
            client.leave()
        assert server.service.refused == {}, "nothing that a client says by itself is refused, or of another version"


def test_a_ready_that_was_lost_is_repeated_by_who_only_looks_for_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(AllReduceModels(), 1, 1) as server, clients(server.address, W(0, 0), joins=True) as (a,):
        with monkeypatch.context() as lost:
            lost.setattr(a.wire._of_training, "send", lambda message: True)
            a.ready(0)
        found = until(a.group_if_known)
        assert found is not None
        assert found.members == (W(0, 0),)


def test_an_absent_scheduler_is_named_by_its_address() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
        with (
            clients(address, W(0, 0), timeout=0.1) as (one,),
            pytest.raises(
                SchedulerError, match=rf"waited 0\.1 s for the scheduler at {address}.*nothing listens there"
            ),
        ):
            one.greet()


def test_another_program_at_the_address_is_told_from_none() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        with (
            clients(f"tcp://127.0.0.1:{silent.getsockname()[1]}", W(0, 0), timeout=0.5) as (one,),
            pytest.raises(SchedulerError, match="accepts connections but does not speak ZeroMQ"),
        ):
            one.greet()


@pytest.mark.parametrize("begins", [False, True])
def test_a_proxy_whose_scheduler_is_not_there_yet_is_waited_for_and_no_key_is_blamed(begins: bool) -> None:
    """As a tunnel, or the service of a cluster, which accepts every connection. If the scheduler ``begins``, the client
    is greeted while another connection of its own, from before, is still to be turned away."""
    ours, worker = make_keys()
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        port = proxy.getsockname()[1]
        turned_away, greeted = 0, not begins

        def close_each() -> None:
            nonlocal turned_away, greeted
            while turned_away < 3 * TRIES or not greeted:
                with proxy.accept()[0] as connection:
                    if begins:
                        connection.sendall(_GREETING[:1])
                    if connection.recv(1):
                        turned_away += 1
                    elif begins:  # it only listened whether this is a scheduler
                        greeted, turned_away = True, 3 * TRIES - 1
            proxy.close()

        thread = threading.Thread(target=close_each)
        thread.start()
        with clients(f"tcp://127.0.0.1:{port}", W(0, 0), credentials=worker, timeout=600) as (a,):
            joining = threading.Thread(target=a.join)
            joining.start()
            thread.join()
            with serving(AllReduceModels(), 1, 1, keys=ours, bind=f"tcp://127.0.0.1:{port}"):
                joining.join()
                a.ready(0)
                assert a.group().members == (W(0, 0),)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_process_whose_thread_for_the_scheduler_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(now: float) -> None:
        raise KeyError("a bug")

    with serving(AllReduceModels(), 1, 1) as server, clients(server.address, W(0, 0), joins=True) as (a,):
        monkeypatch.setattr(a.wire.talk, "due", fails)
        failure = a.first_failure(limit().total_seconds())
    assert failure is not None
    assert failure.worker == W(0, 0)
    assert failure.reason == "its thread that talks to the scheduler ended with KeyError: 'a bug'"


class TestVersions:
    """Older ones, as they were: a byte of version, then a message. Version 1 ignores frames of another version."""

    @pytest.mark.parametrize("version", [1, 5])
    def test_a_new_scheduler_answers_an_old_worker_in_its_own_version(self, version: int) -> None:
        with serving(AllReduceModels(), 1, 1) as server, zmq.Context() as context, context.socket(zmq.DEALER) as old:
            old.setsockopt(zmq.LINGER, 0)
            old.connect(server.address)
            old.send(bytes([version]) + msgspec.msgpack.encode(["join", [0, 0], 1, 1, None]))
            assert old.poll(10_000)
            frame = old.recv()
            assert frame[0] == m.VERSION, "which an old worker prints"
            reply = m.decode_reply(frame)
            assert isinstance(reply, e.Refused)
            assert f"speaks version {version} of the protocol, this side version {m.VERSION}" in reply.reason
            assert server.service.refused == {"other version": 1}

    def test_an_old_scheduler_is_named_by_its_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(conversation, "REPEAT_IN_TRAINING", 0.1)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as old:
            old.setsockopt(zmq.LINGER, 0)
            port = old.bind_to_random_port("tcp://127.0.0.1")

            def serve() -> None:
                while not served.is_set():
                    if old.poll(20):
                        peer, _ = old.recv_multipart()
                        old.send_multipart([peer, b"\x01" + msgspec.msgpack.encode(["status", {}])])

            served, thread = threading.Event(), threading.Thread(target=serve)
            thread.start()
            try:
                for ask in (self.greet, partial(ask_status, timeout=0.5)):
                    with pytest.raises(
                        SchedulerError, match=f"speaks version 1 of the protocol, this side version {m.VERSION}"
                    ):
                        ask(f"tcp://127.0.0.1:{port}")
            finally:
                served.set()
                thread.join()

    def greet(self, address: str) -> None:
        with clients(address, W(0, 0)) as (one,):
            one.greet()


def test_a_group_that_an_earlier_scheduler_was_to_name_is_waited_for_no_longer_and_still_comes() -> None:
    with serving(AllReduceModels(), 1, 2) as server, clients(server.address, W(0, 0), W(0, 1)) as (a, b):
        for client in (a, b):
            client.join()
        a.ready(0)
        with mock.patch.object(a.wire.talk, "is_over", {5: True, 6: False}.__getitem__):
            assert a.group_unless_restarted(5) is None
            b.ready(0)
            assert a.group_unless_restarted(6) == b.group()


def test_the_first_failure_reaches_everybody() -> None:
    with (
        serving(AllReduceModels(), 1, 3) as server,
        clients(server.address, W(0, 0), W(0, 1), W(0, 2), joins=True) as (a, b, c),
    ):
        assert a.first_failure(0.1) is None
        a.ready(0)
        b.failed("out of memory")
        c.failed("lost its neighbour")
        with pytest.raises(WorkerFailedError, match=r"\(stage 0, pipeline 1\) failed first: out of memory"):
            a.group()
        for client in (a, b, c):
            assert client.first_failure(5.0) == e.End("out of memory", True, True, W(0, 1))


def test_a_failure_told_to_nobody_does_not_block() -> None:
    with clients("tcp://127.0.0.1:9", W(0, 0)) as (one,):
        one.failed("nobody listens")
        assert one.first_failure(0.05) is None


def test_heartbeats_keep_a_busy_worker_alive() -> None:
    with (
        serving(AllReduceModels(), 1, 2, worker_timeout=1.0) as server,
        clients(server.address, W(0, 0), W(0, 1), joins=True) as (a, _),
    ):
        a.ready(0)
        a.wire.timeout = 2.0
        with pytest.raises(SchedulerError, match=r"iteration 0.*waits for \(stage 0, pipeline 1\)"):
            a.group()


def test_closing_does_not_wait_for_forked_processes() -> None:
    """Those of a DataLoader have what this one had open."""
    with serving(AllReduceModels(), 1, 1) as server:
        with clients(server.address, W(0, 0), joins=True):
            child = os.fork()
            if child == 0:
                time.sleep(600)
                os._exit(0)
            began = time.monotonic()
        seconds = time.monotonic() - began
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert seconds < limit(4).total_seconds()


def test_a_passive_neighbour_is_invited_while_it_computes() -> None:
    invited: list[Group] = []
    arrived = threading.Event()

    def on_invitation(group: Group, after: int | None) -> None:
        invited.append(group)
        arrived.set()

    with (
        serving(ADPSGD(asynchronous=True), 1, 2) as server,
        clients(server.address, W(0, 0)) as (a,),
        clients(server.address, W(0, 1), on_invitation=on_invitation) as (b,),
    ):
        a.join()
        b.join()
        a.ready(0)
        group = a.group()
        assert group.passive == (W(0, 1),)
        b.leave()
        assert arrived.is_set()
        assert invited == [group], "leave() waits for the invitations that were sent"


def test_an_invitation_that_nobody_can_follow_ends_the_run() -> None:
    with (
        serving(ADPSGD(asynchronous=True), 1, 2) as server,
        clients(server.address, W(0, 0), W(0, 1), joins=True) as (a, _),
    ):

        def train_on() -> None:
            for iteration in range(100_000):
                a.ready(iteration)
                a.group()

        with pytest.raises(
            WorkerFailedError, match=r"\(stage 0, pipeline 1\) failed first.*a passive member of group \d"
        ):
            train_on()


def test_the_last_rows_of_a_worker_leave_with_it() -> None:
    with (
        serving(AllReduceModels(), 1, 1) as server,
        clients(server.address, W(0, 0)) as (a,),
    ):  # heartbeats are 1 s apart
        a.about = About("host", "cpu", 0)
        a.join()
        for iteration in range(100):
            a.step_ended(iteration, 0.0)
        a.leave()
        reply = server.service.handle(b"", m.Ask("rows"), 0.0)[0][1]
        assert isinstance(reply, m.RowsReply)
        assert reply.workers == ((W(0, 0), About("host", "cpu", 0)),)
        told = [row for data in reply.chunks for row in msgspec.msgpack.decode(data, type=Chunk).rows]
        assert sum(row.count for row in told) == 99, "the first update only marks the beginning of the next"
        assert told[-1].update == 99


_GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0" + b"CURVE".ljust(52, b"\0")  # of ZMTP 3.0


@pytest.mark.parametrize("said", [b"", _GREETING[:12], _GREETING], ids=["nothing", "half a greeting", "a greeting"])
def test_a_client_that_gives_up_is_no_intruder(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """As a port scan, a health check, or `sdpipe status` at Ctrl-C."""
    ours, worker = make_keys()
    with serving(AllReduceModels(), 1, 1, keys=ours) as server:
        host, port = server.address.removeprefix("tcp://").split(":")
        for _ in range(3):
            with socket.create_connection((host, int(port))) as gone:
                gone.sendall(said)
                if said == _GREETING:
                    assert gone.recv(64), "the handshake has begun"
        assert ask_status(server.address, credentials=worker).signals == 0
    assert not [record for record in caplog.records if "turned away" in record.getMessage()]


def test_the_right_keys_are_let_in_and_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    ours, worker = make_keys()
    theirs, stranger = make_keys()
    with serving(AllReduceModels(), 1, 1, keys=ours) as server:
        with clients(server.address, W(0, 0), credentials=worker, joins=True) as (a,):
            a.ready(0)
            assert a.group().members == (W(0, 0),)
            assert ask_status(server.address, credentials=worker).signals == 1
        mixed = type(worker)(stranger.public, stranger.secret, worker.scheduler_public)
        for credentials, why in (
            (None, "it asks for a key"),
            (stranger, "it has another key than the one that this worker.key was made for"),
            (mixed, "it does not let this key in"),
            (mixed, "it does not let this key in"),
        ):
            with (
                clients(server.address, W(0, 0), credentials=credentials) as (b,),
                pytest.raises(SchedulerError, match=f"no connection to the scheduler at {server.address}: {why}"),
            ):
                b.join()
            with pytest.raises(SchedulerError, match=why):
                ask_status(server.address, credentials=credentials)
        assert server.service.status(0.0).signals == 1
    warnings = [record.getMessage() for record in caplog.records if "turned away" in record.getMessage()]
    assert warnings.count("a client at 127.0.0.1 without the right key was turned away (logged once)") == 1
    assert len(warnings) == len(set(warnings))
    assert theirs.secret not in repr((ours, theirs, worker, stranger))


def test_keys_for_a_scheduler_without_any_are_named() -> None:
    _, worker = make_keys()
    with (
        serving(AllReduceModels(), 1, 1) as server,
        clients(server.address, W(0, 0), credentials=worker) as (a,),
        pytest.raises(SchedulerError, match=r"it has no keys, and this side has|it has another key .* or none"),
    ):
        a.join()


def test_beyond_this_machine_keys_are_required() -> None:
    with pytest.raises(ConfigurationError, match="without keys"):
        Endpoint("tcp://0.0.0.0:*")
    with pytest.raises(ConfigurationError, match=r"worker\.key"):
        SchedulerClient("tcp://10.0.0.1:5555", W(0, 0), 1)
