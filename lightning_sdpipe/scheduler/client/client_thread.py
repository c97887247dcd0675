"""The thread of an elastic worker's client: its socket, heartbeats, the repetition of requests, and its lifeline.

A process's end of its lifeline: a connection that does nothing but close when the process ends.

A process that is forked would keep it open: data loaders fork, and outlive a parent that is killed. So children close
their copy first of all.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket as sockets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.connection import Connection

CONNECT_WITHIN = 1.0

_open: weakref.WeakSet[Lifeline] = weakref.WeakSet()


class Lifeline:
    """Connects to ``port`` of the machine that the scheduler's ``address`` names, and says ``nonce``.

    Raises:
        OSError: it cannot be reached there.
    """

    def __init__(self, address: str, port: int, nonce: bytes) -> None:
        host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        self.socket = sockets.create_connection((host, port), timeout=CONNECT_WITHIN)
        try:
            self.socket.sendall(nonce)
            self.socket.setblocking(False)
        except OSError:
            self.socket.close()
            raise
        _open.add(self)

    def ended(self) -> bool:
        """It is readable: has the scheduler closed it?"""
        try:
            return not self.socket.recv(64)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def farewell(self) -> None:
        """The process goes as it should."""
        with contextlib.suppress(OSError):
            self.socket.send(b".")
        self.close()

    def close(self) -> None:
        """Which says that the process has ended; safe to call twice."""
        _open.discard(self)
        self.socket.close()


def _close_in_child() -> None:
    for line in list(_open):
        with contextlib.suppress(OSError):
            line.socket.close()


os.register_at_fork(after_in_child=_close_in_child)


log = logging.getLogger(__name__)

FIRST_BEAT = 0.25
"""Seconds between heartbeats before the scheduler has said how many it wants."""
PROBE = 0.05
"""The same, while the scheduler seems to be away, so that one that is started again hears of the run soon."""
REPEAT_AFTER = 0.5
"""Seconds after which an unanswered request is repeated."""


def open_lifeline(address: str, line: e.Line) -> Lifeline | None:
    """What ``line`` asks for; None if the scheduler has none, or cannot be reached there."""
    if not line.port:
        return None
    try:
        return Lifeline(address, line.port, line.nonce)
    except OSError as error:
        log.warning(
            "no connection to port %d of the scheduler's machine (%s), by which it would know at once when this "
            "process ends; it will know by silence, later. Open that port, or choose one with --lifeline-port",
            line.port,
            error,
        )
        return None


class ClientThread:
    """Owns ``connection``.

    ``beat`` makes the next heartbeat, ``unanswered`` are the requests to repeat, ``hear`` is called with every reply.
    """

    def __init__(
        self,
        connection: Connection,
        address: str,
        beat: Callable[[], e.Request],
        unanswered: Callable[[], Sequence[e.Request]],
        hear: Callable[[e.Reply], None],
    ) -> None:
        self._connection, self._address = connection, address
        self._beat, self._unanswered, self._hear = beat, unanswered, hear
        self._interval = FIRST_BEAT
        self.limit = math.inf
        """Seconds after which a transfer that does not move is given up, as the scheduler says."""
        self._outgoing: deque[e.Request] = deque()
        self._beat_at = self._repeat_at = 0.0
        self._lifeline: Lifeline | None = None
        self._was_connected = False
        self._heard_at: float | None = None
        self._closed = False
        self._told, self._tell = os.pipe()
        os.set_blocking(self._told, False)
        os.set_blocking(self._tell, False)
        self._thread = threading.Thread(target=self._run, name="scheduler membership", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def send(self, request: e.Request) -> None:
        """From any thread."""
        self._outgoing.append(request)
        self._wake()

    def beat_now(self) -> None:
        """There is something to tell in a heartbeat."""
        self._beat_at = 0.0
        self._wake()

    def silence(self) -> str:
        """What is known about why no answer came."""
        if self._heard_at is not None:
            ago = time.monotonic() - self._heard_at
            return f"the scheduler at {self._address} was heard of {ago:.1f} s ago; check that it still runs"
        try:
            self._connection.check()
        except SchedulerError as error:
            return str(error)
        return self._connection.silence()

    def close(self) -> None:
        """End the thread and wait for it; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        self._thread.join()
        os.close(self._tell)
        os.close(self._told)

    def _wake(self) -> None:
        try:
            os.write(self._tell, b"\0")
        except BlockingIOError:  # it has been told often enough
            return

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._connection.socket, zmq.POLLIN)
        poller.register(self._told, zmq.POLLIN)
        try:
            while not self._closed:
                now = time.monotonic()
                if now >= self._beat_at:
                    self._outgoing.append(self._beat())
                    away = self._was_connected and self._lifeline is None
                    self._beat_at = now + (min(PROBE, self._interval) if away else self._interval)
                if now >= self._repeat_at:
                    self._outgoing.extend(self._unanswered())
                    self._repeat_at = now + REPEAT_AFTER
                while self._outgoing:
                    self._connection.send(m.encode(self._outgoing.popleft()))  # unsent: repeated, or told again
                wait = max(0.0, min(self._beat_at, self._repeat_at) - time.monotonic())
                events = dict(poller.poll(int(wait * 1000) + 1))
                if self._told in events:
                    os.read(self._told, 4096)
                if self._connection.socket in events:
                    self._receive(poller)
                if self._lifeline is not None and self._lifeline.socket.fileno() in events and self._lifeline.ended():
                    self._drop_lifeline(poller)
        finally:
            self._drop_lifeline(poller)
            self._connection.close()

    def _receive(self, poller: zmq.Poller) -> None:
        while True:
            try:
                if not self._connection.socket.poll(0):
                    return
                reply = self._connection.receive(0)
            except SchedulerError as error:
                log.error("an answer about membership makes no sense: %s", error)
                return
            if self._heard_at is None:
                self._connection.established()
            self._heard_at = time.monotonic()
            if isinstance(reply, e.Line):
                self._interval, self.limit = reply.beat, reply.limit
                self._connect(reply, poller)
            elif isinstance(reply, e.ElasticReply):
                self._hear(reply)
            elif isinstance(reply, m.Refused):  # it speaks another version, and says so
                self._hear(e.Denial(reply.reason))

    def _connect(self, line: e.Line, poller: zmq.Poller) -> None:
        self._drop_lifeline(poller)
        self._lifeline = open_lifeline(self._address, line)
        if self._lifeline is not None:
            self._was_connected = True
            poller.register(self._lifeline.socket.fileno(), zmq.POLLIN)

    def _drop_lifeline(self, poller: zmq.Poller) -> None:
        if self._lifeline is not None:
            poller.unregister(self._lifeline.socket.fileno())
            self._lifeline.close()
            self._lifeline = None
            self._beat_at = 0.0
