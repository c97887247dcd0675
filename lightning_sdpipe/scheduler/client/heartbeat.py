"""A thread that keeps telling the scheduler that its worker lives, however long a computation takes.

It owns a second socket, since ZeroMQ sockets belong to one thread each. What it hears it hands on: a failure
of the run, an invitation to a group, or that the scheduler does not know the worker, in which case it joins
again on the worker's behalf.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

import zmq

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.connection import Connection

log = logging.getLogger(__name__)


class HeartbeatSource(Protocol):
    """What the thread says and hears."""

    def heartbeat(self) -> m.Request:
        """The next sign of life."""

    def rejoin(self) -> m.Request | None:
        """How to join again; None when the worker does not take part now."""

    def book(self) -> m.Request | None:
        """Which leases the worker has heard of, if it was dealt any."""

    def hear_failure(self, failure: m.Failure) -> None:
        """The run is over."""

    def hear_nothing(self, beats: int) -> None:
        """The last ``beats`` heartbeats were not answered."""

    def hear_pulse(self) -> None:
        """A heartbeat was answered."""

    def hear_line(self, line: e.Line) -> None:
        """The scheduler wants a lifeline."""

    def hear_invitation(self, group: Group, after: int | None) -> m.Request | None:
        """The worker is a passive member of ``group``, decided after the answer to that iteration; what there is to say
        to that."""


class HeartbeatThread:
    """Started by :meth:`start`, ended by :meth:`close`."""

    def __init__(self, connect: Callable[[], Connection], pulse: HeartbeatSource, interval: float) -> None:
        self._connect = connect
        self._pulse = pulse
        self._interval = interval
        self._stop, self._tell = os.pipe()
        self._thread = threading.Thread(target=self._run, name="scheduler heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

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
            connection.send(m.encode(self._pulse.heartbeat()))
            unanswered = 1
            while True:
                events = dict(poller.poll(int(self._interval * 1000)))
                if self._stop in events:
                    return
                if connection.socket in events:
                    self._hear(connection)
                    unanswered = 0
                else:
                    self._pulse.hear_nothing(unanswered)
                    connection.send(m.encode(self._pulse.heartbeat()))  # unsent: said again later
                    unanswered += 1
        finally:
            connection.close()

    def _hear(self, connection: Connection) -> None:
        try:
            reply = connection.receive(0)
        except SchedulerError as error:
            log.error("the answer to a heartbeat makes no sense: %s", error)
            return
        request = None
        match reply:
            case m.Unknown():
                request = self._pulse.rejoin()
            case m.AskLeases():
                request = self._pulse.book()
            case e.Line():
                self._pulse.hear_line(reply)
            case m.Abort(failure=failure):
                self._pulse.hear_failure(failure)
            case m.Pulse(failure=m.Failure() as failure):
                self._pulse.hear_failure(failure)
            case m.Pulse():
                self._pulse.hear_pulse()
            case m.Invitation(group=group, after=after):
                request = self._pulse.hear_invitation(group, after)
        if request is not None:
            connection.send(m.encode(request))
