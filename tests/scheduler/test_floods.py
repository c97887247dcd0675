"""Strangers, and clients gone wrong, that send without end: what the scheduler keeps of it is bounded."""

from __future__ import annotations

import os
import socket as sockets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.scheduler import messages as m
from lightning_sdpipe.scheduler import server
from lightning_sdpipe.scheduler.lifelines import MAX_SILENT, NONCE_BYTES, Lifelines
from lightning_sdpipe.scheduler.server import Server
from tests.scheduler.live_scheduler import serving

KNOWN = b"k" * NONCE_BYTES


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
        sent, until = 0, time.monotonic() + 10
        while sent < most and time.monotonic() < until and flood.poll(500, zmq.POLLOUT):
            flood.send(frame)
            sent += 1
    assert server.MOST_UNHANDLED < sent < most


def test_status_that_is_asked_for_and_never_read_is_dropped() -> None:
    with serving(NoSync(), 1, 1) as busy, stranger(busy.address) as flood:
        for _ in range(120 * server.MOST_UNREAD):
            assert flood.poll(10_000, zmq.POLLOUT)
            flood.send(m.encode(m.AskStatus()))
        with stranger(busy.address) as other:
            other.send(m.encode(m.AskStatus()))
            assert other.poll(10_000), "others are answered meanwhile"
        answered = 0
        while flood.poll(500):
            flood.recv()
            answered += 1
    assert answered < 120 * server.MOST_UNREAD


def test_connections_without_a_nonce_of_the_run_hold_no_descriptors() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as heard:
        heard.bind("inproc://heard")
        lifelines = Lifelines(context, "127.0.0.1", 0, "inproc://heard", b"lines", lambda nonce: nonce == KNOWN)
        with lifelines:
            process = sockets.create_connection(("127.0.0.1", lifelines.port), timeout=10)
            process.sendall(KNOWN)
            before = len(os.listdir("/proc/self/fd"))
            strangers = []
            for number in range(4 * MAX_SILENT):
                strangers.append(sockets.create_connection(("127.0.0.1", lifelines.port), timeout=10))
                if number % 2:
                    strangers[-1].sendall(os.urandom(NONCE_BYTES))
            until = time.monotonic() + 10
            while (held := len(os.listdir("/proc/self/fd")) - before - len(strangers)) > MAX_SILENT + 1:
                assert time.monotonic() < until, f"{held} connections of strangers are held"
                time.sleep(0.02)
            process.close()
            assert heard.poll(10_000), "the end of a process is heard of all the same"
            assert heard.recv_multipart() == [b"lines", KNOWN]
            for each in strangers:
                each.close()
