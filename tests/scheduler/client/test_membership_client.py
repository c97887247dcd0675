"""Workers of an elastic run and a scheduler over real sockets: threads for processes, and a process that is killed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import Enrolled
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler.client import conversation
from lightning_sdpipe.scheduler.client.client import (
    Callbacks,
    CancelledError,
    MustEndError,
    Receive,
    SchedulerClient,
    Start,
)
from lightning_sdpipe.scheduler.client.wire import ask_status
from lightning_sdpipe.scheduler.credentials import make_keys
from lightning_sdpipe.scheduler.log.event_log import read_log
from lightning_sdpipe.scheduler.log.status_page import render, to_plain
from lightning_sdpipe.scheduler.server.server import Server
from tests.exchange.threads import together
from tests.patience import until
from tests.scheduler.live_scheduler import serving

SAME = {"model": "linear", "version": "1"}
SOON = ElasticConfig(settle=0.0)
T_INF = SemiDecentralized(window=float("inf"))


class Fleet:
    """Clients of one scheduler, closed at the end; each has enrolled when it is returned."""

    def __init__(self, server: Server, stack: ExitStack) -> None:
        self.server, self.stack = server, stack

    def client(self, pipeline: int, incarnation: int, stage: int = 0, **options: Any) -> SchedulerClient:
        options = {"timeout": 10.0, **options}
        client = SchedulerClient(self.server.address, Worker(stage, pipeline), incarnation, **options)
        self.stack.callback(client.close)
        return client

    def start(self, *pipelines: int) -> list[SchedulerClient]:
        """Of pipelines that start together."""
        clients = [self.client(pipeline, 100 + pipeline) for pipeline in pipelines]
        answers = at_once(*[lambda c=c: c.enrol(SAME) for c in clients])  # type: ignore[misc]
        assert all(isinstance(answer, Start) and answer.fresh for answer in answers)
        return clients


@contextmanager
def running(
    policy: PolicyConfig = T_INF, pipelines: int = 2, terms: ElasticConfig = SOON, **options: Any
) -> Iterator[Fleet]:
    options = {"worker_timeout": 5.0, **options}
    with serving(policy, options.pop("stages", 1), pipelines, elastic=terms, **options) as server, ExitStack() as stack:
        yield Fleet(server, stack)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of all, each in a thread of its own."""
    return together(len(calls), lambda place: calls[place]())


def comes(fleet: Fleet, donors: list[SchedulerClient], pipeline: int, incarnation: int) -> SchedulerClient:
    """A newcomer, to whom one of the donors gives its state while all make updates."""
    client = fleet.client(pipeline, incarnation)
    done = threading.Event()

    def train() -> None:
        for update in itertools.count():
            for donor in donors:
                for transfer in donor.donations:
                    donor.snapshot_taken(transfer, update)
            if done.wait(0.002):
                return

    thread = threading.Thread(target=train)
    thread.start()
    try:
        receive = client.enrol(SAME)
        assert isinstance(receive, Receive)
        start = client.received(receive.transfer, receive.update)
        assert isinstance(start, Start)
        assert not start.fresh
    finally:
        done.set()
        thread.join()
    return client


def test_a_newcomer_is_given_a_state_and_everybody_hears_of_the_new_epoch(tmp_path: Path) -> None:
    log = tmp_path / "scheduler.jsonl"
    with running(terms=ElasticConfig(settle=0.0, start_pipelines=2), log=log) as fleet:
        first, second = fleet.start(0, 1)
        third = comes(fleet, [first, second], 5, 900)
        for client in (first, second, third):
            until(lambda c=client: c.epoch.number == 2)  # type: ignore[misc]
            assert client.epoch.pipelines == (0, 1, 5), "numbered beyond those that were planned"
            assert client.epoch.members[0].pipeline == 0
        status = ask_status(fleet.server.address)
        assert not status.refused
        here = status.members
        assert here is not None
        assert (here.epoch, here.reason, here.held) == (2, "pipeline 5 has come", "")
        assert here.states == {0: "leader", 1: "member", 5: "member"}
        assert "members         epoch 2: pipeline 5 has come\n                0 leader, 1 member" in render(status)
        assert to_plain(status)["members"]
    (record,) = read_log(log)
    assert list(record.differences()) == []
    assert any(isinstance(entry.event, Enrolled) for entry in record.entries)


def test_groups_name_a_process_group_that_all_members_hold() -> None:
    with running(terms=ElasticConfig(settle=0.0, start_pipelines=2)) as fleet:
        clients = fleet.start(0, 1)
        joined = threading.Thread(target=lambda: at_once(*[client.join for client in clients]))
        joined.start()
        clients[0].holds([1])
        clients[1].holds([1])
        joined.join()
        for client in clients:
            client.ready(0)
        groups = at_once(*[client.group for client in clients])
        assert groups[0] == groups[1]
        assert groups[0].epoch == 1
        for client in clients:
            client.holds([])
            client.ready(1)
        clients[0].holds([1])
        clients[1].holds([1])
        assert at_once(*[client.group for client in clients])[0].epoch == 1, "it was kept until they shared one"


def test_a_wait_in_vain_names_who_is_missing() -> None:
    with running(terms=ElasticConfig(settle=0.0, start_pipelines=2)) as fleet:
        first, _ = fleet.start(0, 1)
        first.wire.timeout = 0.5
        with pytest.raises(SchedulerError, match=r"waited 0.5 s for the others at pause.*\(stage 0, pipeline 1\)"):
            first.meet("pause")
    with running(terms=ElasticConfig(3, settle=0.0)) as fleet:
        alone = fleet.client(0, 7)
        alone.wire.timeout = 0.5
        with pytest.raises(SchedulerError, match=r"starts when 3 pipelines are there; pipeline 0 waits"):
            alone.enrol(SAME)


def test_a_job_that_differs_or_claims_a_number_that_is_taken_is_refused() -> None:
    with running() as fleet:
        fleet.start(0)
        with pytest.raises(SchedulerError, match="model: found other, expected linear"):
            fleet.client(1, 7).enrol(SAME | {"model": "other"})
        with pytest.raises(SchedulerError, match="pipeline 0 is trained by another job, which is alive"):
            fleet.client(0, 8).enrol(SAME)
        with pytest.raises(SchedulerError, match="pipelines of 1 stages"):
            fleet.client(1, 9, stage=1).enrol(SAME)
    with running(PHDPSGD(group_size=1)) as fleet, pytest.raises(SchedulerError, match="divides the 2 pipelines"):
        fleet.client(2, 7).enrol(SAME)
    with serving(T_INF, 1, 2) as server:
        ordinary = SchedulerClient(server.address, Worker(0, 0), 3)
        with pytest.raises(SchedulerError, match="pipelines do not come and go"):
            ordinary.enrol(SAME)
        ordinary.close()


def test_a_process_that_was_declared_lost_must_end() -> None:
    ended = threading.Event()
    with running(stages=2, terms=ElasticConfig(settle=0.0, start_pipelines=2)) as fleet:
        told = Callbacks(ends=lambda _: ended.set())
        last = fleet.client(0, 7, told=told)
        first = fleet.client(0, 7, stage=1)
        others = [fleet.client(1, 8, stage=stage) for stage in range(2)]
        at_once(*[lambda c=c: c.enrol(SAME) for c in (last, first, *others)])  # type: ignore[misc]
        first.close()
        assert ended.wait()
        with pytest.raises(MustEndError, match=r"pipeline 0 must end: stage 1 ended \(its connection closed\)"):
            last.meet("pause")
        with pytest.raises(MustEndError, match="this process of pipeline 0 must end: stage 1 ended"):
            last.join()


def test_a_scheduler_that_is_started_again_hears_of_the_run_from_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        terms = ElasticConfig(start_pipelines=2, settle=0.0)
        with serving(T_INF, 1, 2, elastic=terms, worker_timeout=5.0) as server:
            address = server.address
            fleet = Fleet(server, stack)
            clients = fleet.start(0, 1)
            for client in clients:
                client.holds([1])
            met = at_once(*[lambda c=c: c.meet("pause/1") for c in clients])  # type: ignore[misc]
            at_once(*[client.join for client in clients])
            clients[0].ready(3)
        monkeypatch.setattr(conversation, "REPEAT_IN_TRAINING", 0.0)
        for _ in range(3000):  # more than ZeroMQ keeps by itself for one that is away
            assert clients[0].group_if_known() is None
        monkeypatch.undo()
        with serving(T_INF, 1, 2, bind=address, elastic=ElasticConfig(settle=1.5), worker_timeout=5.0) as server:
            for client in clients:
                until(lambda c=client: c.epoch.number == 2)  # type: ignore[misc]
            assert clients[0].epoch.reason == "the scheduler was started again"
            assert clients[0].epoch.pipelines == (0, 1)
            assert clients[1].meet("pause/1") == met[1], "which is not decided again"
            clients[1].ready(3)
            groups = at_once(*[client.group for client in clients])
            assert groups[0] == groups[1]
            assert groups[0].epoch == 1, "groups of the run before stay in use"


def test_a_process_that_is_killed_is_gone_at_once_though_its_children_live() -> None:
    with running(terms=ElasticConfig(settle=0.0, start_pipelines=2), worker_timeout=30.0) as fleet:
        first = fleet.client(0, 100)
        script = f"""
import os, sys, time
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.policies.all_reduce import AllPresent
from lightning_sdpipe.scheduler.client.client import SchedulerClient
client = SchedulerClient({fleet.server.address!r}, Worker(0, 1), 7)
client.enrol({SAME!r})
time.sleep(0.3)  # the lifeline comes first
if os.fork() == 0:
    print("child", os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        child = 0
        try:
            first.wire.timeout = 600.0
            assert isinstance(first.enrol(SAME), Start)
            assert process.stdout is not None
            child = int(process.stdout.readline().split()[1])
            process.kill()
            until(lambda: first.epoch.lost == (1,))
            assert "its connection closed" in first.epoch.reason
        finally:
            process.kill()
            process.wait()
            if child:
                os.kill(child, signal.SIGKILL)


def test_the_store_waits_counts_and_can_be_cancelled() -> None:
    with running() as fleet:
        (client,) = fleet.start(0)
        assert client.fetch(["a/x"]) == (None,)
        puts = [lambda k=k, v=v: client.put(k, v) for k, v in (("a/x", b"1"), ("a/y", b"2"))]
        assert at_once(lambda: client.wait(["a/x", "a/y"]), *puts)[0] == (b"1", b"2")
        assert [client.add("a/n", 2), client.add("a/n", 3)] == [2, 5]
        assert [client.remove("a/x"), client.remove("a/x")] == [True, False]
        with pytest.raises(SchedulerError, match=r"refuses 600000 bytes at .a/z.; keys of the form"):
            client.put("a/z", b"0" * 600_000)
        with pytest.raises(CancelledError):
            client.wait(["a/never"], cancelled=lambda: True)
        with pytest.raises(SchedulerError, match=r"waited 0\.2 s for another worker to set a/never"):
            client.wait(["a/never"], timeout=0.2)


def test_with_keys_membership_is_encrypted_and_lifelines_need_their_nonce() -> None:
    keys, worker_keys = make_keys()
    with running(keys=keys, terms=ElasticConfig(settle=0.0, start_pipelines=2)) as fleet:
        clients = [fleet.client(i, 100 + i, credentials=worker_keys) for i in (0, 1)]
        at_once(*[lambda c=c: c.enrol(SAME) for c in clients])  # type: ignore[misc]
        clients[1].close()
        until(lambda: clients[0].epoch.lost == (1,))
        stranger = fleet.client(3, 5)
        stranger.wire.timeout = 1.0
        with pytest.raises(SchedulerError, match="waited 1 s"):
            stranger.enrol(SAME)
