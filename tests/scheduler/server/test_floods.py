"""Strangers, and clients gone wrong, that send without end: what the scheduler keeps of it is bounded."""

from __future__ import annotations

import os
import socket as sockets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import Enrolled, Epoch, Meets, Member, Resumed
from lightning_sdpipe.membership.membership import Membership
from lightning_sdpipe.membership.pipelines import Roster
from lightning_sdpipe.membership.recovery import MemberRecovery
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.server import server
from lightning_sdpipe.scheduler.server.key_value_store import MAX_KEY_CHARACTERS, KeyValueStore, StoreFull
from lightning_sdpipe.scheduler.server.lifelines import MAX_SILENT, NONCE_BYTES, Lifelines, Lines
from lightning_sdpipe.scheduler.server.server import Server
from tests.patience import until
from tests.scheduler.live_scheduler import serving
from tests.scheduler.server.test_elastic_service import SAME, B, ElasticDialogue


@contextmanager
def stranger(address: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 1)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.connect(address)
        yield socket


def test_frames_that_are_not_handled_wait_on_the_side_of_the_client() -> None:
    frame, most = b"x" * (1 << 16), 40 * server.MOST_UNHANDLED
    with Server(NoSync(), 1, 1) as held_up, stranger(held_up.address) as flood:  # it is open, and nobody serves
        sent = 0
        while sent < most and flood.poll(500, zmq.POLLOUT):
            flood.send(frame)
            sent += 1
    assert server.MOST_UNHANDLED < sent < most


def test_status_that_is_asked_for_and_never_read_is_dropped() -> None:
    with serving(NoSync(), 1, 1) as busy, stranger(busy.address) as flood:
        for _ in range(120 * server.MOST_UNREAD):
            assert flood.poll(10_000, zmq.POLLOUT)
            flood.send(m.encode(m.Ask("status")))
        with stranger(busy.address) as other:
            other.send(m.encode(m.Ask("status")))
            assert other.poll(10_000), "others are answered meanwhile"
        answered = 0
        while flood.poll(500):
            flood.recv()
            answered += 1
    assert answered < 120 * server.MOST_UNREAD


def test_connections_without_a_nonce_of_the_run_hold_no_descriptors() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as heard:
        heard.bind("inproc://heard")
        lines = Lines()
        known = lines.give(Worker(0, 0), 1)
        lifelines = Lifelines(context, "127.0.0.1", 0, "inproc://heard", b"lines", lines, 30.0)
        with lifelines:
            process = sockets.create_connection(("127.0.0.1", lifelines.port))
            process.sendall(known)
            before = len(os.listdir("/proc/self/fd"))
            strangers = []
            for number in range(4 * MAX_SILENT):
                strangers.append(sockets.create_connection(("127.0.0.1", lifelines.port)))
                if number % 2:
                    strangers[-1].sendall(os.urandom(NONCE_BYTES))
            until(lambda: len(os.listdir("/proc/self/fd")) - before - len(strangers) <= MAX_SILENT + 1)
            process.close()
            assert heard.poll(10_000), "the end of a process is heard of all the same"
            assert heard.recv_multipart() == [b"lines", known]
            for each in strangers:
                each.close()


def test_what_a_faulty_member_says_of_others_is_not_kept() -> None:
    d = ElasticDialogue()
    d.all_say(e.Enrol, SAME)
    membership = d.service.members.membership
    for first in range(0, 1 << 20, 1 << 10):
        made_up = tuple(range(first, first + 64))
        d.all_say(e.Beat, (), membership.epoch.number, True, False, None, (-1, -1), made_up, of=[B])
    assert d.service.failure is None
    assert len(membership._reach._missed) <= 1


def test_the_reason_of_a_failure_is_cut() -> None:
    d = ElasticDialogue()
    d.all_say(e.Enrol, SAME)
    d.all_say(e.Depart, False, "x" * 100_000, of=[B])
    assert d.service.failure is None
    reason = d.service.members.membership.roster.tombstone(B.pipeline, B.incarnation)
    assert 0 < len(reason or "") < 2 * m.MAX_REASON_CHARACTERS


def test_what_is_repeated_while_a_scheduler_comes_back_is_kept_once() -> None:
    first = Resumed(Worker(0, 0), 5, {}, Epoch(3, (Member(0, 5),), ""), ())
    returning, other = MemberRecovery(first.epoch, 10.0, 1), Worker(0, 1)
    for number in range(1000):
        returning.hear_other(Enrolled(other, 6, {"model": f"{number}"}), Roster(1))
        returning.hear_other(Meets(other, 6, f"epoch {number}", b""), Roster(1))
    assert returning.early == {other: Enrolled(other, 6, {"model": "999"})}
    membership = Membership(1, ElasticConfig(1, 2, recovery_grace=10.0))
    membership.on(Resumed(Worker(0, 0), 5, {}, Epoch(3, (Member(0, 5), Member(1, 6)), ""), ()), 0.0)
    for pipeline in range(1 << 20, (1 << 20) + 100):
        membership.on(Enrolled(Worker(0, pipeline), 6, {}), 0.1)
    assert membership.recovering
    assert membership._returning is not None
    assert not membership._returning.early


def test_keys_that_are_waited_for_are_counted() -> None:
    store = KeyValueStore(max_missing=5000)

    def wait(number: int) -> None:
        store.wait((b"a", number), tuple(f"room/{number}/{key}" for key in range(1000)), 0.0)

    with pytest.raises(StoreFull, match="at most"):
        store.wait((b"a", 0), ("room/" + "x" * MAX_KEY_CHARACTERS,), 0.0)
    for number in (0, 1, 2, 3, 4, 4):
        wait(number)
    with pytest.raises(StoreFull, match="keys to wait for"):
        wait(5)


def test_a_thousand_pipelines_may_begin_to_wait_for_each_other_at_once() -> None:
    store, keys = KeyValueStore(), tuple(f"epoch-1/0.{pipeline}" for pipeline in range(1024))
    for key in keys[:-1]:
        assert store.wait((key.encode(), 0), keys, 0.0) is None


def test_of_keys_that_are_waited_for_those_that_are_there_do_not_count() -> None:
    """A storm at 256 pipelines: each tells where it is and waits for all, and some are gone before they have told."""
    store = KeyValueStore()
    for epoch in range(20):
        keys = [f"epoch-{epoch}/{name}" for name in range(256)]
        for key in keys[3:]:
            store.put(key, b"")
            assert store.wait((key.encode(), epoch), tuple(keys), 0.0) is None
    assert [len(store.put(key, b"")) for key in keys[:3]] == [0, 0, 253]
    store.remove(keys[0])
    assert store.wait((b"late", 0), (keys[0], keys[1]), 0.0) is None
    store.remove(keys[1])
    assert store.put(keys[0], b"") == []
    assert store.put(keys[1], b"") == [((b"late", 0), (b"", b""))]
