"""Delay of the answer to a ready while programs that have asked the scheduler do not read its replies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import zmq

from lightning_sdpipe.meter import PHASES
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.connection import use_keys
from lightning_sdpipe.scheduler.rows import MOST, MOST_UPDATES, NewRows, UpdateRow
from lightning_sdpipe.scheduler.server.row_desk import REPLY_BYTES
from recipes.suites.ratios import Ratios, Row, ratio
from recipes.suites.scheduler import Server, connected, server_of

KIND = "one group"
GOAL = 1.1
_TOLD = 1 << 39
"""Numbers of requests from here on bring rows."""


def measure(
    *, clients: int, viewers: int, signals: int, repeats: int, seed: int, filled: int = REPLY_BYTES
) -> tuple[list[Row], Ratios]:
    """p99 of ``signals`` in bursts of so many ``clients``, with stalled ``viewers`` over none, one after the other.

    Each viewer has asked for the status, for spans, and for rows, of which the scheduler has ``filled`` bytes or more.
    """
    rows: list[Row] = []
    quotients = []
    with server_of(KIND, clients) as server:
        _fill(server, clients, filled)
        for repeat in range(repeats):
            found = {}
            for many in random.Random(f"{seed}/{repeat}").sample([0, viewers], 2):
                with (
                    connected(KIND, clients, server, session=2 * repeat + (many > 0)) as bursts,
                    _stalled(server, many),
                ):
                    bursts.repeat(max(5, 1000 // clients))
                    found[many] = bursts.repeat(signals // clients)
                    rows.append({"what": "viewers", "viewers": many, "repeat": repeat} | found[many])
            quotients.append(found[viewers]["p99_us"] / found[0]["p99_us"])
    meaning = f"last ready of a group to its answer, p99, {clients} clients: {viewers} stalled viewers over none"
    return rows, {"viewers": ratio(quotients, GOAL, meaning)}


def _fill(server: Server, clients: int, size: int) -> None:
    """Tell rows, as workers that leave do."""
    us = (1 << 20,) * len(PHASES)
    chunk = NewRows(tuple(UpdateRow(update, 1, us, 0) for update in range(MOST)), 0)
    with connected(KIND, clients, server, session=1 << 30) as bursts:
        worker, socket = bursts.first
        frame = b""
        for number in range(_TOLD, _TOLD + 2 + size // len(m.encode(m.Leave(worker, 0, 0, chunk)))):
            frame = m.encode(m.Leave(worker, 1 << 30, number, chunk))
            socket.send(frame)
            socket.recv()


@contextmanager
def _stalled(server: Server, count: int) -> Iterator[None]:
    """So many programs have asked, as often as they would, and read nothing of what comes."""
    questions = [m.encode(question) for question in (m.AskStatus(), m.AskRows(0), m.AskSpans(MOST_UPDATES))]
    with zmq.Context() as context, ExitStack() as stack:
        sockets = [stack.enter_context(context.socket(zmq.DEALER)) for _ in range(count + 1)]
        for socket in sockets:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 1)
            use_keys(socket, server.keys)
            socket.connect(server.address)
        *viewers, other = sockets
        for socket in viewers:
            for frame in (*questions, *questions):
                socket.send(frame)
        for socket in viewers:
            if not socket.poll(30_000):
                raise TimeoutError("the scheduler did not answer a viewer")
        other.send(questions[0])  # behind all that they have asked
        if not other.poll(30_000):
            raise TimeoutError("the scheduler did not answer")
        yield
