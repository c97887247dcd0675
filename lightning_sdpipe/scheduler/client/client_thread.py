"""The thread under an elastic worker's conversation with the scheduler: its socket, its clock, and its lifeline.

A lifeline is a connection that does nothing but close when the process ends.

A process that is forked would keep it open: data loaders fork, and outlive a parent that is killed. So children close
their copy first of all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket as sockets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq

from lightning_sdpipe.errors import MustEndError, RefusedError, SchedulerError, WorkerFailedError
from lightning_sdpipe.membership.members import Epoch
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import conversation as c
from lightning_sdpipe.scheduler.client.connection import Connection

log = logging.getLogger(__name__)

CONNECT_WITHIN = 1.0
GLANCE = 0.02
"""Seconds between looks whether a wait is still needed."""

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


class RunOverError(WorkerFailedError):
    """The run is over: ``failed``, or all have finished."""

    def __init__(self, reason: str, failed: bool) -> None:
        super().__init__(reason)
        self.failed = failed


class CancelledError(SchedulerError):
    """What was waited for is not needed any more."""


def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Callbacks:
    """What is called in the client's thread, and must return quickly: for each new epoch, when another member did not
    get the result of a group, when this process must end, and when the run is over."""

    epoch: Callable[[Epoch], None] = _nothing
    broke: Callable[[int], None] = _nothing
    ended: Callable[[str], None] = _nothing
    over: Callable[[str, bool], None] = _nothing


def open_lifeline(address: str, port: int, nonce: bytes) -> Lifeline | None:
    """What the scheduler at ``address`` asks for; None if it has none (``port`` 0), or cannot be reached there."""
    if not port:
        return None
    try:
        return Lifeline(address, port, nonce)
    except OSError as error:
        log.warning(
            "no connection to port %d of the scheduler's machine (%s), by which it would know at once when this "
            "process ends; it will know by silence, later. Open that port, or choose one with --lifeline-port",
            port,
            error,
        )
        return None


class ClientThread:
    """Owns ``connection``, to the scheduler at ``address``, and ``talk``; waits last ``timeout`` seconds at most."""

    def __init__(
        self, connection: Connection, address: str, talk: c.Conversation, told: Callbacks, timeout: float
    ) -> None:
        self.timeout = timeout
        self._connection, self._address, self._talk, self._told = connection, address, talk, told
        self._changed = threading.Condition()
        """Guards the conversation, and what became of the asks that are waited for."""
        self._outcomes: dict[c.Key, e.Reply | Exception | None] = {}
        self._lifeline: Lifeline | None = None
        self._heard_at: float | None = None
        self._closed = False
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._awake, False)
        os.set_blocking(self._wake, False)
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name="scheduler membership", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    @contextlib.contextmanager
    def talking(self) -> Iterator[c.Conversation]:
        """The conversation, for this thread alone; what is due then is said at once."""
        with self._changed:
            yield self._talk
            due = self._talk.deadline
        if due <= time.monotonic():
            self._rouse()

    def ask(
        self,
        what: str,
        kind: Callable[..., e.Request],
        *fields: object,
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> e.Reply:
        """Ask, and wait for ``what``.

        Raises:
            WorkerFailedError: the process must end, or the run is over.
            CancelledError: ``cancelled`` said so, which is looked at often.
            SchedulerError: it was refused, or did not come.
        """
        seconds, worker, departs = self.timeout if timeout is None else timeout, self._talk.worker, kind is e.Depart
        with self.talking() as talk:
            self._check(departs)
            key = talk.ask(kind, *fields)
            self._outcomes[key] = None
        with self._changed:
            try:
                until = time.monotonic() + seconds
                while (outcome := self._outcomes[key]) is None and (left := until - time.monotonic()) > 0:
                    self._check(departs)
                    self._changed.wait(left if cancelled is None else min(left, GLANCE))
                    if cancelled is not None and cancelled():
                        raise CancelledError(f"worker {worker} need no longer wait for {what}")
            finally:
                del self._outcomes[key]
                missing = talk.forget(key)
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            said = f"the scheduler at {self._address} says: {missing}" if missing else self._silence()
            raise SchedulerError(f"worker {worker} waited {seconds:g} s for {what}; {said}")
        return outcome

    def check(self) -> None:
        """Raise WorkerFailedError if the process must end, or the run is over."""
        with self._changed:
            self._check(departs=False)

    def close(self) -> None:
        """End the thread and wait for it; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._rouse()
        self._thread.join()
        os.close(self._wake)
        os.close(self._awake)

    def _check(self, departs: bool) -> None:
        stop = self._talk.stop
        if stop is not None and not departs:
            if stop.run:
                raise RunOverError(stop.reason, stop.failed)
            raise MustEndError(self._talk.worker.pipeline, stop.reason)

    def _silence(self) -> str:
        """What is known about why no answer came."""
        if self._heard_at is not None:
            ago = time.monotonic() - self._heard_at
            return f"the scheduler at {self._address} was heard of {ago:.1f} s ago; check that it still runs"
        try:
            self._connection.check()
        except SchedulerError as error:
            return str(error)
        return self._connection.silence()

    def _rouse(self) -> None:
        try:
            os.write(self._wake, b"\0")
        except BlockingIOError:  # it has been told often enough
            return

    # ------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        poller, socket = self._poller, self._connection.socket
        poller.register(socket, zmq.POLLIN)
        poller.register(self._awake, zmq.POLLIN)
        try:
            while not self._closed:
                with self._changed:
                    requests = self._talk.due(time.monotonic())
                    deadline = self._talk.deadline
                for request in requests:
                    self._connection.send(m.encode(request))  # unsent: repeated, or told again
                wait = max(0.0, deadline - time.monotonic())
                events = dict(poller.poll(int(wait * 1000) + 1))
                if self._awake in events:
                    os.read(self._awake, 4096)
                if socket in events:
                    self._receive()
                if self._lifeline is not None and self._lifeline.socket.fileno() in events and self._lifeline.ended():
                    self._drop_lifeline()
        finally:
            self._drop_lifeline()
            self._connection.close()

    def _receive(self) -> None:
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
            if isinstance(reply, m.Refused):  # it speaks another version, and says so
                reply = e.Denial(reply.reason)
            if isinstance(reply, e.ElasticReply):
                with self._changed:
                    effects = self._talk.hear(reply)
                    self._changed.notify_all()
                for effect in effects:
                    self._carry_out(effect)

    def _carry_out(self, effect: c.Effect) -> None:
        match effect:
            case c.Replied(key, reply):
                self._came(key, reply)
            case c.NotGranted(key, reason):
                self._came(key, RefusedError(f"the scheduler at {self._address} refused: {reason}"))
            case c.EpochBegan(epoch):
                self._told.epoch(epoch)
            case c.GroupBroke(sequence):
                self._told.broke(sequence)
            case c.Connect(port, nonce):
                self._connect(port, nonce)
            case c.MustStop(reason, run=False):
                self._told.ended(reason)
            case c.MustStop(reason, failed=failed):
                self._told.over(reason, failed)

    def _came(self, key: c.Key, outcome: e.Reply | Exception) -> None:
        with self._changed:
            if key in self._outcomes:
                self._outcomes[key] = outcome
            elif isinstance(outcome, Exception):  # of what was only told
                log.error("%s", outcome)
            self._changed.notify_all()

    def _connect(self, port: int, nonce: bytes) -> None:
        self._drop_lifeline()
        self._lifeline = open_lifeline(self._address, port, nonce)
        if self._lifeline is not None:
            self._poller.register(self._lifeline.socket.fileno(), zmq.POLLIN)
            with self._changed:
                self._talk.lifeline(there=True)

    def _drop_lifeline(self) -> None:
        if self._lifeline is not None:
            self._poller.unregister(self._lifeline.socket.fileno())
            self._lifeline.close()
            self._lifeline = None
            with self._changed:
                self._talk.lifeline(there=False)
