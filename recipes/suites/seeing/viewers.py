"""Delay of the answer to a ready while viewers do not read the scheduler's replies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import zmq

from lightning_sdpipe.meter import PHASES
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.rows import MOST, MOST_UPDATES, NewRows, UpdateRow
from lightning_sdpipe.scheduler.server.row_desk import REPLY_BYTES
from recipes.suites.grid import Goal, Ratios, Row, ratios
from recipes.suites.scheduler import Server, connected, dealer, server_of

KIND = "one group"
_TOLD = 1 << 39
"""Requests numbered from here on carry rows."""


def measure(
    *, clients: int, viewers: int, signals: int, repeats: int, seed: int, filled: int = REPLY_BYTES
) -> tuple[list[Row], Ratios]:
    """Return the ratio of the p99 of ``signals``, in bursts of ``clients`` clients, with stalled ``viewers`` to that
    without.

    Each viewer has asked for the status, spans and rows, of which the scheduler has at least ``filled`` bytes.
    """
    rows: list[Row] = []
    with server_of(KIND, clients) as server:
        _fill(server, clients, filled)
        for repeat in range(repeats):
            for many in random.Random(f"{seed}/{repeat}").sample([0, viewers], 2):
                session = 2 * repeat + (many > 0)
                with connected(KIND, clients, server, session) as bursts, _stalled(server, many):
                    bursts.repeat(max(5, 1000 // clients))
                    row = {"what": "viewers", "viewers": many, "repeat": repeat}
                    rows.append(row | bursts.repeat(signals // clients))
    meaning = f"last ready of a group to its answer, p99, {clients} clients: {viewers} stalled viewers over none"
    goal = Goal(meaning, "p99_us", {"viewers": viewers}, {"viewers": 0}, 1.1)
    return rows, ratios(rows, {"viewers": goal})


def _fill(server: Server, clients: int, size: int) -> None:
    """Send the scheduler ``size`` bytes of rows, as leaving workers do."""
    us = (1 << 20,) * len(PHASES)
    chunk = NewRows(tuple(UpdateRow(update, 1, us, 0) for update in range(MOST)), 0)
    with connected(KIND, clients, server, session=1 << 30) as bursts:
        socket, worker = next(iter(bursts.workers.items()))
        for number in range(_TOLD, _TOLD + 2 + size // len(m.encode(m.Leave(worker, 0, 0, chunk)))):
            socket.send(m.encode(m.Leave(worker, 1 << 30, number, chunk)))
            socket.recv()


@contextmanager
def _stalled(server: Server, count: int) -> Iterator[None]:
    """Connect ``count`` viewers that ask as usual and read no replies."""
    questions = [m.encode(question) for question in (m.Ask("status"), m.Ask("rows"), m.Ask("spans", MOST_UPDATES))]
    with zmq.Context() as context, ExitStack() as stack:
        sockets = [dealer(stack, context, server, RCVHWM=1) for _ in range(count + 1)]
        *viewers, other = sockets
        for socket in viewers:
            for frame in (*questions, *questions):
                socket.send(frame)
        for socket in viewers:
            if not socket.poll(30_000):
                raise TimeoutError("the scheduler did not answer a viewer")
        other.send(questions[0])  # after all of the viewers' questions
        if not other.poll(30_000):
            raise TimeoutError("the scheduler did not answer")
        yield
