"""Requests of every type with values that fit the type and nothing else: each is answered or refused, and the run goes
on."""

from __future__ import annotations

import math
import random
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import settings

from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import FIXED
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.server.service import SchedulerService

SENT = 10_000 if settings.default.max_examples >= 10_000 else 500
"""Of each type; more with --hypothesis-profile=long."""
STAGES, PIPELINES = 2, 3
REQUESTS = [*get_args(m.Request), *get_args(e.Request)]
INTEGERS = (0, 1, 2, 3, 7, 255, 65_536, 1 << 31, 1 << 62, (1 << 62) + 1, (1 << 64) - 1, -1, -(1 << 63))
FLOATS = (0.0, 0.5, 1.0, 1e-300, 1e300, -1.0, math.inf, -math.inf, math.nan)
TEXTS = ("", "a", "a/b", "room/", "/", "past", "x" * 600, "\x00", "é")


def draw(rng: random.Random, kind: Any) -> Any:
    """A value of the type ``kind``, as a frame would hold it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return rng.choice(arguments)
    if origin is Annotated:
        return draw(rng, arguments[0])
    if origin in (Union, types.UnionType):
        return draw(rng, rng.choice(arguments))
    if origin is tuple:
        if arguments[-1] is ...:
            return tuple(draw(rng, arguments[0]) for _ in range(rng.choice((0, 1, 1, 2, 3))))
        return tuple(draw(rng, argument) for argument in arguments)
    if origin is list:
        return [draw(rng, arguments[0]) for _ in range(rng.randrange(3))]
    if origin is dict:
        return {draw(rng, arguments[0]): draw(rng, arguments[1]) for _ in range(rng.randrange(3))}
    if kind is Worker:
        return Worker(rng.choice((0, 0, 0, 1, 2, 1 << 62)), rng.choice((0, 0, 1, 2, 3, 65_536, 1 << 62)))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind, include_extras=True)
        return kind(**{name: draw(rng, hints[name]) for name in kind.__struct_fields__})
    values: dict[Any, Callable[[], Any]] = {
        int: lambda: rng.choice(INTEGERS),
        float: lambda: rng.choice(FLOATS),
        bool: lambda: rng.random() < 0.5,
        str: lambda: rng.choice(TEXTS),
        bytes: lambda: rng.randbytes(rng.choice((0, 1, 40))),
        type(None): lambda: None,
    }
    return values[kind]()


def request_of(rng: random.Random, kind: type[Any], worker: Worker, incarnation: int, number: int) -> Any:
    """Of the live ``incarnation``, mostly, so that it is not turned away for whose it is."""
    drawn = draw(rng, kind)
    if rng.random() < 0.1:
        return drawn
    return msgspec.structs.replace(drawn, worker=worker, number=number, incarnation=incarnation)


@pytest.mark.parametrize("elastic", [False, True], ids=["ordinary", "elastic"])
@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_every_type_with_any_values(kind: type[Any], elastic: bool) -> None:
    rng = random.Random(kind.__name__)
    terms = ElasticConfig(1, 2, 5.0, 60.0) if elastic else None
    service = SchedulerService(SemiDecentralized(window=0.05), STAGES, PIPELINES, worker_timeout=1e9, elastic=terms)
    like = {"model": "a"} if elastic else FIXED
    now, sent, heard = 0.0, 0, 0
    workers = [Worker(stage, pipeline) for stage in range(STAGES) for pipeline in range(PIPELINES)]

    def say(request: Any) -> None:
        nonlocal now, sent
        now, sent = now + 0.01, sent + 1
        name = e.peer_of if isinstance(request, e.MemberRequest) else m.routing_id
        peer = name(request.worker, request.incarnation)
        try:
            decoded = m.decode_request(m.encode(request))
        except (m.MalformedFrame, OverflowError):
            return
        for _, reply in service.handle(peer, decoded, now) + service.tick(now):
            m.decode_reply(m.encode(reply))
        service.validate()

    for worker in workers:
        say(e.Enrol(worker, 5 + worker.pipeline, 1, like))
        say(m.Join(worker, 5 + worker.pipeline, 1, None))
    for number in range(2, SENT + 2):
        worker = rng.choice(workers)
        say(request_of(rng, kind, worker, 5 + worker.pipeline, number))
        heard += 1
        if service.failure is not None and kind is e.Depart and not elastic:
            return  # which is what it asks for
        assert service.failure is None, service.failure
        if number % 50 == 0:  # whoever has left comes back
            for each in workers:
                say(e.Enrol(each, 5 + each.pipeline, number, like))
                say(m.Join(each, 5 + each.pipeline, number, None))
    m.encode(m.StatusReply(service.status(now)))
    assert heard == SENT
