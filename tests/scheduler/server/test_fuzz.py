"""Nonsense, at the decoder and at a live server: it changes nothing."""

from __future__ import annotations

import random
import socket as sockets
from collections.abc import Iterator
from typing import get_args

import pytest
import zmq
from hypothesis import settings

from lightning_sdpipe.dealing.leases import Book, Done, Lease, Segment
from lightning_sdpipe.membership.members import FIXED, Epoch, Member
from lightning_sdpipe.policies import Group, Reason, Worker
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.rows import About, NewRows, UpdateRow
from tests.scheduler.live_scheduler import clients, serving

FRAMES, SENT = (1_000_000, 100_000) if settings.default.max_examples >= 10_000 else (200_000, 20_000)
"""At the decoders and at a live server; more of them with --hypothesis-profile=long."""

A, B = Worker(0, 0), Worker(0, 1)
GROUP = Group((A, B), (0.5, 0.5), 3, Reason.ENFORCED)
ANSWER = m.Answer(GROUP, (4, 5))
EPOCH = Epoch(3, (Member(0, 5), Member(1, 1 << 60)), "tested")
SEGMENT = Segment(1 << 60, 2, 0, 100)
LEASE = Lease(SEGMENT, 1, 3, 0, 40, 70, 123.5, 2.25)
ROWS = NewRows((UpdateRow(7, 1, (1,) * 13, 0), UpdateRow(9, 2, (1000,) * 13, 4)), 250, 1)
REQUESTS = [
    m.Hello(A, 1 << 60, 1, (2, 3)),
    m.Join(A, 1 << 60, 1, None),
    e.Enrol(B, 5, 9, FIXED, e.Resumes(EPOCH, (), heard=3, joined=True, answered=4, answers=(ANSWER, ANSWER))),
    m.Join(B, 5, 9, (1, 2), about=About("host", "cuda:1", 3)),
    m.Ready(A, 1 << 60, 2, 7),
    m.Leave(B, 5, 6),
    m.Leave(B, 5, 7, ROWS),
    e.Depart(A, 1, 3, False, "out of memory"),
    e.Enrol(B, 1, 4, FIXED),
    e.Store(B, 1, 5, "put", ("a/b",), b"c"),
    e.Beat(A, 1, 6, (1, 2), 2, True),
    e.Beat(A, 1, 6, (), 1, True, joined=True, rows=ROWS),
    e.Beat(B, 1, 6, (), 1, True, dealt=(SEGMENT, Done(7, 0.25, 0.1))),
    m.AskLease(A, 1, 7, SEGMENT, 3, Done(0)),
    e.Enrol(B, 1, 8, FIXED, e.Resumes(EPOCH, (3,), book=Book(SEGMENT, (LEASE, LEASE), False, Done(7, 0.25, 0.1)))),
    m.Ask("status"),
    m.Ask("rows", -9),
]
REPLIES = [
    m.Welcome(1, "{}", (2, 2)),
    e.Noted(4),
    ANSWER,
    m.Answer(Group((A, B), (0.25, 0.75), 3, "its turn", (B,), ((B,), (A,))), (4, None)),
    e.Refused(3, "no"),
    e.Stranger(known=True),
    e.Waits(4, "it waits"),
    e.Now(0, over=e.End("no", True, True, A)),
    e.Now(4, e.Line(5555, b"nonce", 1.0, 30.0), EPOCH, "too few", ("state-1",), (3, 4)),
    e.Stored(4, (b"a", None)),
    m.Invitation(GROUP),
    m.Dealt(LEASE, 3),
    m.RowsReply(2.5, ((A, About("host", "cpu", 3, 32)),), 0, 1, (b"\x90",)),
]


def nonsense(count: int, seed: int, valid: list[bytes]) -> Iterator[bytes]:
    """Random bytes, and valid frames with bytes changed, cut off, repeated or put in."""
    rng = random.Random(seed)
    pick, number, spot = rng.choice, rng.random, rng.randrange
    for _ in range(count):
        kind = number()
        if kind < 0.2:
            yield rng.randbytes(spot(40))
            continue
        frame = bytearray(pick(valid))
        if kind < 0.3:
            del frame[spot(len(frame)) :]
        elif kind < 0.4:
            frame += rng.randbytes(spot(8))
        elif kind < 0.5:
            at = spot(len(frame))
            frame[at:at] = frame[: spot(len(frame))]
        for _ in range(spot(4)):
            if frame:
                frame[spot(len(frame))] = spot(256)
        yield bytes(frame)


def test_the_protocol_is_small() -> None:
    assert sum(len(get_args(of)) for of in (m.Request, m.Reply, e.Request, e.Reply)) <= 32
    assert len(m.encode(m.Ready(Worker(3, 200), 1 << 62, 1 << 20, 1 << 20))) <= 32


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_requests_survive_the_wire(message: m.Request | e.Request) -> None:
    assert m.decode_request(m.encode(message)) == message


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_replies_survive_the_wire(message: m.Reply | e.Reply) -> None:
    assert m.decode_reply(m.encode(message)) == message


def test_many_frames_at_the_decoders() -> None:
    """Each is a message of the declared types, or is refused as malformed; nothing else comes out."""
    requests = [m.encode(request) for request in REQUESTS]
    replies = [m.encode(reply) for reply in REPLIES]
    accepted = 0
    for decode, valid, types in (
        (m.decode_request, requests, tuple(map(type, REQUESTS))),
        (m.decode_reply, replies, tuple(map(type, REPLIES))),
    ):
        for frame in nonsense(FRAMES // 2, 1, valid):
            try:
                message = decode(frame)
            except m.MalformedFrame:
                continue
            assert isinstance(message, types)
            accepted += 1
    assert 0 < accepted < 0.9 * FRAMES


def iterate(address: str, count: int) -> list[Group]:
    with clients(address, A, B) as (a, b):
        a.join()
        b.join()
        groups = []
        for iteration in range(count):
            a.ready(iteration)
            b.ready(iteration)
            groups += [a.group(), b.group()]
        a.leave()
        b.leave()
    return groups


def asks_for_the_status(frame: bytes) -> bool:
    try:
        request = m.decode_request(frame)
    except m.MalformedFrame:
        return False
    return isinstance(request, m.Ask) and request.what == "status"


def test_many_frames_at_a_live_server() -> None:
    """It answers the workers in between exactly as it would have without."""
    spec = SemiDecentralized(window=60.0)
    with serving(spec, 1, 2) as server:
        undisturbed = iterate(server.address, SENT // 500)
    valid = [m.encode(request) for request in REQUESTS]
    with (
        serving(spec, 1, 2) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stranger,
        clients(server.address, A, B) as (a, b),
    ):
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(server.address)
        a.join()
        b.join()
        groups: list[Group] = []
        ask = m.encode(m.Ask("status"))
        asked = 1
        for index, frame in enumerate(nonsense(SENT, 2, valid)):
            stranger.send(frame)
            asked += asks_for_the_status(frame)
            if index % 500 == 499:
                iteration = index // 500
                a.ready(iteration)
                b.ready(iteration)
                groups += [a.group(), b.group()]
        assert groups == undisturbed
        stranger.send(ask)
        asks, told_the_version, told_rows = asked, 0, 0
        while asked:
            assert stranger.poll(30_000)
            reply = m.decode_reply(stranger.recv())
            asked -= isinstance(reply, m.StatusReply)
            told_the_version += isinstance(reply, e.Refused)
            told_rows += isinstance(reply, m.RowsReply)
        assert isinstance(reply, m.StatusReply)
        assert set(reply.status.refused) == {"malformed", "other version", "impersonating"}
        assert sum(reply.status.refused.values()) == SENT + 1 - asks - told_rows, "all others were ignored"
        assert reply.status.refused["other version"] == told_the_version
        assert reply.status.failure is None


def test_bytes_that_are_not_even_zeromq_close_their_own_connection_only() -> None:
    rng = random.Random(3)
    with serving(SemiDecentralized(window=60.0), 1, 2) as server:
        host, _, port = server.address.removeprefix("tcp://").rpartition(":")
        for _ in range(50):
            with sockets.create_connection((host, int(port)), timeout=600) as raw:
                raw.sendall(rng.randbytes(rng.randrange(1, 4000)))
        assert len(iterate(server.address, 3)) == 6


def test_a_frame_above_the_limit_is_not_even_read() -> None:
    with (
        serving(SemiDecentralized(window=60.0), 1, 2) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stranger,
    ):
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(server.address)
        stranger.send(b"\x01" * (m.MAX_REQUEST_BYTES + 1))
        assert len(iterate(server.address, 3)) == 6
        assert server.service.refused == {}
