"""What carries a worker's conversation with the scheduler: two sockets, a thread with a clock, and a lifeline.

One socket belongs to the thread here, which sends heartbeats and whatever any thread asks. The other one belongs to the
thread that trains, since its requests through another thread arrived late.

A lifeline is a connection that does nothing but close when the process ends. A forked child would keep it open: data
loaders fork, and outlive a parent that is killed. So children close their copy before anything else.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from lightning_sdpipe.errors import MustEndError, RefusedError, SchedulerError, WorkerFailedError
from lightning_sdpipe.membership.members import Epoch
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import effects as f
from lightning_sdpipe.scheduler.client.connection import GLANCE, Connection
from lightning_sdpipe.scheduler.client.conversation import REPEAT_IN_TRAINING, Conversation
from lightning_sdpipe.scheduler.credentials import WorkerKeys, host_and_port

log = logging.getLogger(__name__)

CONNECT_WITHIN = 2.5
"""Seconds; the kernel sends a lost first packet again after 1 s."""
MEANWHILE = 0.02
"""Seconds between checks whether a wait is still needed, and between calls of what is done during one."""

_open: weakref.WeakSet[Lifeline] = weakref.WeakSet()


class Lifeline:
    """Connects to ``port`` of the machine that the scheduler's ``address`` names, and says ``nonce``.

    Raises:
        OSError: the port cannot be reached.
    """

    def __init__(self, address: str, port: int, nonce: bytes) -> None:
        self.socket = sockets.create_connection((host_and_port(address)[0], port), timeout=CONNECT_WITHIN)
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

    def __init__(self, end: e.End) -> None:
        super().__init__(end.reason if end.worker is None else str(m.Failure(end.worker, end.reason)))
        self.failed = end.failed


class CancelledError(SchedulerError):
    """The wait was cancelled, since its result is no longer needed."""


def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Callbacks:
    """Functions that the client's thread calls, and that must return quickly: for each new epoch, when another member
    did not get the result of a group, when this process must end or the run is over, and when this worker is to hand
    over the result of the group of that number to the other members of one."""

    epoch: Callable[[Epoch], None] = _nothing
    broke: Callable[[int], None] = _nothing
    ends: Callable[[e.End], None] = _nothing
    hands_over: Callable[[int, Group], None] = _nothing


class Wire:
    """Connects ``talk`` to the scheduler at ``address``, and starts its heartbeats; a wait lasts ``timeout`` seconds at
    most, unless it is given another limit."""

    def __init__(
        self, address: str, talk: Conversation, told: Callbacks, timeout: float, credentials: WorkerKeys | None
    ) -> None:
        self.talk, self.told, self.timeout = talk, told, timeout
        self.on_invitation: Callable[[Group, int | None], None] = _nothing
        """Called in the thread, too, for a group that the worker is a passive member of, with the last iteration that
        had been answered before, None if none had since the worker joined."""
        self.changed = threading.Condition()
        """Guards the conversation and the replies; notified of every reply."""
        self._address = address
        self._replies: dict[f.Key, m.Reply | e.Reply | None] = {}
        """The reply to each request that is waited for, once it has come."""
        self._lifeline: Lifeline | None = None
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        names = e.peer_of(talk.worker, talk.incarnation), m.routing_id(talk.worker, talk.incarnation)
        try:
            self._connection, self._of_training = (
                Connection(self._context, address, credentials, name) for name in names
            )
        except BaseException:
            self._context.destroy(linger=0)  # with a socket that could not become a connection
            raise
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._awake, False)
        os.set_blocking(self._wake, False)
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name="scheduler client", daemon=True)
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

    def ask(self, kind: f.Kind, *fields: Any) -> f.Key:
        """Ask, and return the key under which to :meth:`wait` for the reply.

        Raises:
            WorkerFailedError: as :meth:`check`, unless the thread that trains asks, or the process departs.
        """
        trains = issubclass(kind, m.TrainingRequest)
        with self.changed if trains else self.talking():
            if not trains and kind is not e.Depart:
                self.check()
            key = self.talk.ask(kind, *fields)
            self._replies[key] = None
        if trains:
            self._speak_in_training()
        return key

    def ask_for(
        self,
        what: str,
        kind: f.Kind,
        *fields: Any,
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Any:
        """Ask, and :meth:`wait` for ``what``."""
        return self.wait(self.ask(kind, *fields), what, timeout, cancelled)

    def wait(
        self,
        key: f.Key,
        what: str,
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> Any:
        """Return the reply to the request ``key``, and name ``what`` is waited for if none comes; see :meth:`comes`.

        Raises:
            WorkerFailedError: as :meth:`check`.
            CancelledError: ``cancelled``, which is called often, has returned true.
            SchedulerError: the request was refused, or no reply came.
        """
        seconds = self.timeout if timeout is None else timeout
        try:
            self.comes(key, seconds, cancelled, meanwhile)
        finally:
            with self.changed:
                reply, missing = self._replies.pop(key, None), self.talk.forget(key)
        if isinstance(reply, e.Refused):
            raise RefusedError(f"the scheduler at {self._address} refused: {reply.reason}")
        if reply is None:
            said = f"the scheduler at {self._address} says: {missing}" if missing else self._silence()
            raise SchedulerError(f"worker {self.talk.worker} waited {seconds:g} s for {what}; {said}")
        return reply

    def comes(
        self,
        key: f.Key,
        seconds: float,
        cancelled: Callable[[], bool] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> bool:
        """Return whether the reply to the request ``key`` comes within ``seconds``; call ``meanwhile`` often."""
        until, left = time.monotonic() + seconds, seconds
        longest = math.inf if cancelled is meanwhile is None else MEANWHILE
        while self._replies.get(key) is None and left >= 0:
            self.check(key)
            if meanwhile is not None:
                meanwhile()
            if cancelled is not None and cancelled():
                raise CancelledError(f"worker {self.talk.worker} need no longer wait")
            left = until - time.monotonic()
            self._listen(key, max(0.0, min(left, longest)))
        return self._replies.get(key) is not None

    def take(self, key: f.Key) -> m.Reply | e.Reply | None:
        """Return the reply to the request ``key``, if it has come, which is not waited for any more."""
        with self.changed:
            return self._replies.pop(key, None)

    def check(self, key: f.Key = ("any", "")) -> None:
        """Raise WorkerFailedError if the process must end, or the run is over, unless the request ``key`` says that the
        process departs."""
        stop = self.talk.stop
        if stop is not None and not (isinstance(key, tuple) and key[0] == "departs"):
            raise RunOverError(stop) if stop.run else MustEndError(self.talk.worker.pipeline, stop.reason)

    def close(self) -> None:
        """End the thread, wait for it, and free the sockets; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._rouse()
        self._thread.join()
        os.close(self._wake)
        os.close(self._awake)
        self._of_training.close()
        self._context.term()

    def _listen(self, key: f.Key, seconds: float) -> None:
        """Wait for a reply, perhaps that to the request ``key``, for at most so many ``seconds``."""
        if isinstance(key, tuple):
            with self.changed:
                if self._replies.get(key) is None:
                    self.changed.wait(seconds)
            return
        self._speak_in_training()
        connection = self._of_training
        if connection.heard_at is None:
            connection.check()
            seconds = min(seconds, GLANCE)
        reply = connection.receive(min(seconds, REPEAT_IN_TRAINING))
        if reply is not None:
            self._hear(reply)

    def _speak_in_training(self) -> None:
        with self.changed:
            requests = self.talk.due_in_training(time.monotonic())
        for request in requests:
            if not self._of_training.send(m.encode(request)) and self._of_training.heard_at is not None:
                raise SchedulerError(
                    f"worker {self.talk.worker} has no connection to the scheduler at {self._address}; check that it "
                    "runs, can be reached, and was started with the keys that belong to this worker's"
                )

    def _silence(self) -> str:
        """Describe what is known about why no answer came."""
        heard = [at for at in (self._connection.heard_at, self._of_training.heard_at) if at is not None]
        if heard:
            ago = time.monotonic() - max(heard)
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

    def _hear(self, reply: m.Reply | e.Reply) -> None:
        with self.changed:
            effects = self.talk.hear(reply)
            for effect in effects:
                if isinstance(effect, f.Replied) and effect.key in self._replies:
                    self._replies[effect.key] = effect.reply
                elif isinstance(effect, f.Replied) and isinstance(effect.reply, e.Refused):
                    log.error("the scheduler at %s refused: %s", self._address, effect.reply.reason)
            self.changed.notify_all()
        self._carry_out(effects)

    def _carry_out(self, effects: Sequence[f.Effect]) -> None:
        for effect in effects:
            match effect:
                case f.EpochBegan(epoch):
                    self.told.epoch(epoch)
                case f.GroupBroke(sequence):
                    self.told.broke(sequence)
                case f.HandOver(sequence, group):
                    self.told.hands_over(sequence, group)
                case f.Connect(port, nonce):
                    self._connect(port, nonce)
                case e.End():
                    self.told.ends(effect)
                case m.Invitation(group, after):
                    self.on_invitation(group, after)
                case f.Warned(text):
                    log.warning("%s (the scheduler is at %s)", text, self._address)

    # ------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        poller, socket = self._poller, self._connection.socket
        poller.register(socket, zmq.POLLIN)
        poller.register(self._awake, zmq.POLLIN)
        try:
            while not self._closed:
                with self.changed:
                    requests = self.talk.due(time.monotonic())
                    if effects := self.talk.given_up():
                        self.changed.notify_all()
                    deadline = self.talk.deadline
                for request in requests:
                    self._connection.send(m.encode(request))  # an unsent one is repeated, or told again
                self._carry_out(effects)
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
        try:
            while self._connection.socket.poll(0):
                if (reply := self._connection.receive(0)) is not None:
                    self._hear(reply)
        except SchedulerError as error:
            log.error("an answer about membership makes no sense: %s", error)

    def _connect(self, port: int, nonce: bytes) -> None:
        """Open the lifeline that the scheduler asks for, if it has one (``port`` above 0) and can be reached."""
        self._drop_lifeline()
        if not port:
            return
        try:
            self._lifeline = Lifeline(self._address, port, nonce)
        except OSError as error:
            log.warning(
                "no connection to port %d of the scheduler's machine (%s), by which it would know at once when this "
                "process ends; it will know by silence, later. Open that port, or choose one with --lifeline-port",
                port,
                error,
            )
            return
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
