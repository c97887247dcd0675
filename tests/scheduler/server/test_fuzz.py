"""Nonsense, at the decoder and at a live server: it changes nothing."""

from __future__ import annotations

import random
import socket as sockets
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import get_args

import zmq
from hypothesis import settings

from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from tests.scheduler.live_scheduler import clients, serving
from tests.scheduler.server.test_bad_values import draw

FRAMES, SENT = (1_000_000, 100_000) if settings.default.max_examples >= 10_000 else (200_000, 20_000)
"""At the decoders and at a live server; more of them with --hypothesis-profile=long."""

A, B = Worker(0, 0), Worker(0, 1)
REQUESTS, REPLIES = (
    (*get_args(of), *get_args(by_members)) for of, by_members in ((m.Request, e.Request), (m.Reply, e.Reply))
)
ASKS = [m.encode(m.Ask("status")), m.encode(m.Ask("rows", -9))]


def frames_of(kind: type, decode: Callable[[bytes], object]) -> list[bytes]:
    """Some messages of that type."""
    rng, found = random.Random(kind.__name__), list[bytes]()
    while len(found) < 3:
        with suppress(m.MalformedFrame, OverflowError):
            frame = m.encode(draw(rng, kind))
            decode(frame)
            found.append(frame)
    return found


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
    assert len(m.encode(m.Ready(Worker(3, 200), 1 << 62, 1 << 20, 1 << 20))) <= 33


def test_many_frames_at_the_decoders() -> None:
    """Messages survive the wire; and each frame is one of the declared types, or is refused as malformed; nothing else
    comes out."""
    accepted = 0
    for decode, types in ((m.decode_request, REQUESTS), (m.decode_reply, REPLIES)):
        valid = [frame for kind in types for frame in frames_of(kind, decode)]
        assert [m.encode(decode(frame)) for frame in valid] == valid  # type: ignore[arg-type]
        for frame in nonsense(FRAMES // 2, 1, valid):
            try:
                message = decode(frame)
            except m.MalformedFrame:
                continue
            assert isinstance(message, types)
            accepted += 1
    assert 0 < accepted < 0.9 * FRAMES


def iterate(address: str, count: int) -> list[Group]:
    with clients(address, A, B, joins=True) as (a, b):
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
    of_workers = [frame for kind in REQUESTS if kind is not m.Ask for frame in frames_of(kind, m.decode_request)]
    valid = [*of_workers, *ASKS]
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
        stranger.send(ASKS[0])
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
