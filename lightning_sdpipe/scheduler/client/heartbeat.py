"""A thread that keeps telling the scheduler that its worker lives, however long a computation takes."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable

import zmq

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.connection import Connection

log = logging.getLogger(__name__)


SOONEST = 1 / 8
"""Seconds between two heartbeats, however much there is to tell."""


class HeartbeatThread:
    """Owns a line, since ZeroMQ sockets belong to one thread each, and calls ``beat`` and ``hear`` with it.

    Started by :meth:`start`, ended by :meth:`close`.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        beat: Callable[[Connection], None],
        hear: Callable[[Connection, m.Reply | e.Reply], None],
        interval: float,
    ) -> None:
        self._connect, self._beat, self._hear = connect, beat, hear
        self._interval = interval
        self._stop, self._tell = os.pipe()
        self._thread = threading.Thread(target=self._run, name="scheduler heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def beat_soon(self) -> None:
        """There is something to tell."""
        os.write(self._tell, b".")

    def close(self) -> None:
        """End the thread and wait for it."""
        os.write(self._tell, b"!")  # closing it would tell nothing while a forked process, of a DataLoader, has it too
        self._thread.join()
        os.close(self._tell)
        os.close(self._stop)

    def _run(self) -> None:
        connection = self._connect()
        connection.established()  # the training's connection has been looked at
        try:
            poller = zmq.Poller()
            poller.register(connection.socket, zmq.POLLIN)
            poller.register(self._stop, zmq.POLLIN)
            beaten, soon = -math.inf, False
            while True:
                now = time.monotonic()
                if now >= (due := beaten + (min(SOONEST, self._interval) if soon else self._interval)):
                    self._beat(connection)
                    beaten, soon = now, False
                    continue
                events = dict(poller.poll(int((due - now) * 1000) + 1))
                if self._stop in events:
                    if b"!" in os.read(self._stop, 4096):
                        return
                    soon = True
                if connection.socket in events:
                    self._receive(connection)
        finally:
            connection.close()

    def _receive(self, connection: Connection) -> None:
        try:
            reply = connection.receive(0)
        except SchedulerError as error:
            log.error("the answer to a heartbeat makes no sense: %s", error)
            return
        if reply is not None:
            self._hear(connection, reply)
