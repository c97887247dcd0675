"""The thread under a worker's conversation with the scheduler: its socket, its clock, and its lifeline.

A lifeline is a connection that does nothing but close when the process ends. A forked child would keep it open: data
loaders fork, and outlive a parent that is killed. So children close their copy before anything else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket as sockets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import zmq

from lightning_sdpipe.errors import MustEndError, RefusedError, SchedulerError, WorkerFailedError
from lightning_sdpipe.membership.members import Epoch
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import effects as f
from lightning_sdpipe.scheduler.client.connection import Connection
from lightning_sdpipe.scheduler.client.conversation import Conversation

log = logging.getLogger(__name__)

CONNECT_WITHIN = 2.5
"""Seconds; the kernel sends a lost first packet again after 1 s."""
GLANCE = 0.02
"""Seconds between checks whether a wait is still needed."""

_open: weakref.WeakSet[Lifeline] = weakref.WeakSet()


class Lifeline:
    """Connects to ``port`` of the machine that the scheduler's ``address`` names, and says ``nonce``.

    Raises:
        OSError: the port cannot be reached.
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
        """Return whether the scheduler has closed the connection, which is then readable."""
        try:
            return not self.socket.recv(64)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection, which tells the scheduler that the process has ended; safe to call twice."""
        _open.discard(self)
        self.socket.close()


def _close_in_child() -> None:
    for line in list(_open):
        with contextlib.suppress(OSError):
            line.socket.close()


os.register_at_fork(after_in_child=_close_in_child)


class RunOverError(WorkerFailedError):
    """The run is over: it has ``failed``, or all pipelines have finished."""

    def __init__(self, reason: str, failed: bool) -> None:
        super().__init__(reason)
        self.failed = failed


class CancelledError(SchedulerError):
    """The wait was cancelled, since its result is no longer needed."""


def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Callbacks:
    """Functions that the client's thread calls, and that must return quickly: for each new epoch, when another member
    did not get the result of a group, when this process must end, when the run is over, and when this worker is to hand
    over the result of the group of that number to the other members of one."""

    epoch: Callable[[Epoch], None] = _nothing
    broke: Callable[[int], None] = _nothing
    ended: Callable[[str], None] = _nothing
    over: Callable[[str, bool], None] = _nothing
    hands_over: Callable[[int, Group], None] = _nothing


def open_lifeline(address: str, port: int, nonce: bytes) -> Lifeline | None:
    """Open the lifeline that the scheduler at ``address`` asks for; None if it has none (``port`` 0), or cannot be
    reached."""
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
        self, connection: Connection, address: str, talk: Conversation, told: Callbacks, timeout: float
    ) -> None:
        self.timeout, self.talk, self.told = timeout, talk, told
        self.on_invitation: Callable[[Group, int | None], None] = _nothing
        """Called in the thread, too, for a group that the worker is a passive member of, with the last iteration that
        had been answered before, None if none had since the worker joined."""
        self.changed = threading.Condition()
        """Guards the conversation and the outcomes of requests; notified of every reply."""
        self._connection, self._address = connection, address
        self._outcomes: dict[f.Key, e.Reply | Exception | None] = {}
        self._lifeline: Lifeline | None = None
        self._heard_at: float | None = None
        self._closed = False
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._awake, False)
        os.set_blocking(self._wake, False)
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name="scheduler client", daemon=True)

    def start(self) -> None:
        """Start the thread, and with it the heartbeats."""
        self._thread.start()

    @contextlib.contextmanager
    def talking(self) -> Iterator[Conversation]:
        """Give this thread exclusive use of the conversation; messages that fall due inside the block are sent at
        once."""
        with self.changed:
            before = self.talk.deadline
            yield self.talk
            due = self.talk.deadline
        if due < before or due <= time.monotonic():
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
            CancelledError: ``cancelled``, which is called often, has returned true.
            SchedulerError: the request was refused, or no reply came.
        """
        seconds, worker, departs = self.timeout if timeout is None else timeout, self.talk.worker, kind is e.Depart
        with self.talking() as talk:
            self._check(departs)
            key = talk.ask(kind, *fields)
            self._outcomes[key] = None
        with self.changed:
            try:
                until = time.monotonic() + seconds
                while (outcome := self._outcomes[key]) is None and (left := until - time.monotonic()) > 0:
                    self._check(departs)
                    self.changed.wait(left if cancelled is None else min(left, GLANCE))
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
        with self.changed:
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
        stop = self.talk.stop
        if stop is not None and not departs:
            if stop.run:
                raise RunOverError(stop.reason, stop.failed)
            raise MustEndError(self.talk.worker.pipeline, stop.reason)

    def _silence(self) -> str:
        """Describe what is known about why no answer came."""
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
        except BlockingIOError:  # the pipe is full: the thread wakes anyway
            return

    # ------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        poller, socket = self._poller, self._connection.socket
        poller.register(socket, zmq.POLLIN)
        poller.register(self._awake, zmq.POLLIN)
        try:
            while not self._closed:
                with self.changed:
                    requests = self.talk.due(time.monotonic())
                    effects = self.talk.given_up()
                    deadline = self.talk.deadline
                for request in requests:
                    self._connection.send(m.encode(request))  # an unsent one is repeated, or told again
                self.carry_out(effects)
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
            if reply is not None:
                with self.changed:
                    effects = self.talk.hear(reply)
                    self.changed.notify_all()
                self.carry_out(effects)

    def carry_out(self, effects: Sequence[f.Effect]) -> None:
        """Carry out what follows from replies on this socket, and the end of the run as heard on the training
        thread's."""
        for effect in effects:
            match effect:
                case f.Replied(key, reply):
                    self._came(key, reply)
                case f.NotGranted(key, reason):
                    self._came(key, RefusedError(f"the scheduler at {self._address} refused: {reason}"))
                case f.EpochBegan(epoch):
                    self.told.epoch(epoch)
                case f.GroupBroke(sequence):
                    self.told.broke(sequence)
                case f.HandOver(sequence, group):
                    self.told.hands_over(sequence, group)
                case f.Connect(port, nonce):
                    self._connect(port, nonce)
                case e.End(reason=reason, run=False):
                    self.told.ended(reason)
                case e.End(reason=reason, failed=failed):
                    self.told.over(reason, failed)
                case m.Invitation(group, after):
                    self.on_invitation(group, after)
                case f.IsLost(worker, reason):
                    log.warning("worker %s %s; the others go on without it", worker, reason)
                case f.Unheard(seconds):
                    log.warning(
                        "worker %s: the scheduler at %s has not answered for %.0f s; a worker that needs a group waits "
                        "up to %g s, and it can be started again at the same address",
                        *(self.talk.worker, self._address, seconds, self.timeout),
                    )

    def _came(self, key: f.Key, outcome: e.Reply | Exception) -> None:
        with self.changed:
            if key in self._outcomes:
                self._outcomes[key] = outcome
            elif isinstance(outcome, Exception):  # the failure of a request that nothing waits for
                log.error("%s", outcome)
            self.changed.notify_all()

    def _connect(self, port: int, nonce: bytes) -> None:
        self._drop_lifeline()
        self._lifeline = open_lifeline(self._address, port, nonce)
        if self._lifeline is not None:
            self._poller.register(self._lifeline.socket.fileno(), zmq.POLLIN)
            with self.changed:
                self.talk.lifeline(there=True)

    def _drop_lifeline(self) -> None:
        if self._lifeline is not None:
            self._poller.unregister(self._lifeline.socket.fileno())
            self._lifeline.close()
            self._lifeline = None
            with self.changed:
                self.talk.lifeline(there=False)
