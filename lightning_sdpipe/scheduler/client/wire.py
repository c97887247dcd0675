"""What carries a worker's conversation with the scheduler: two connections, a thread with a clock, and a lifeline.

ZeroMQ connects in the background and for ever: a wrong address, a wrong key and a scheduler that is about to start all
look like silence. Its monitor of a socket knows more: whether anything listens, and how a handshake failed.

One connection belongs to the thread here, which sends heartbeats and the requests of any thread. The other belongs to
the thread that trains, whose requests arrived late through another thread.

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
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightning_sdpipe.errors import ConfigurationError, MustEndError, RefusedError, SchedulerError, WorkerFailedError
from lightning_sdpipe.membership.members import Epoch
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import conversation as c
from lightning_sdpipe.scheduler.credentials import WorkerKeys, check_port, host_and_port, is_loopback
from lightning_sdpipe.scheduler.log.status import Status

log = logging.getLogger(__name__)

CONNECT_WITHIN = 2.5
"""Seconds; the kernel sends a lost first packet again after 1 s."""
MEANWHILE = 0.02
"""Seconds between checks whether a wait is still needed, and between calls of what is done during one."""

GLANCE = 0.1
"""Seconds between checks of the monitor, until an answer has come."""

TRIES = 3
"""Handshakes that must fail before the program there is asked whether it speaks ZeroMQ, and again before the keys are
blamed: a scheduler that is just ending fails one, and so does a proxy whose scheduler has just begun."""

GREETING = 1.0
"""Seconds within which a scheduler sends the first byte of a connection."""
_GREETING = b"\xff"  # of ZMTP, the protocol of ZeroMQ

_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_Answer = TypeVar("_Answer", m.StatusReply, m.RowsReply, m.SpansReply)

_open: weakref.WeakSet[Lifeline] = weakref.WeakSet()


class Connection:
    """A DEALER socket to the scheduler; it belongs to one thread.

    Args:
        context: ZeroMQ context of the process.
        address: address of the scheduler.
        credentials: the worker's keys; None on loopback.
        name: identity by which the scheduler knows this socket; None for any.

    Raises:
        SchedulerError: ``address`` is no address.
        ConfigurationError: ``address`` is on another machine, and there are no keys.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        credentials: WorkerKeys | None,
        name: bytes | None = None,
    ) -> None:
        check_credentials(address, credentials)
        self.address = address
        self.socket = socket = context.socket(zmq.DEALER)
        self._has_keys = credentials is not None
        self._listens = self._speaks = False
        self._failures = 0
        self._greeted = False
        self.heard_at: float | None = None
        """Time of the last reply."""
        self._verdict: str | None = None
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1 if "[" in address else 0)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if name is not None:
            socket.setsockopt(zmq.ROUTING_ID, name)
        if credentials is not None:
            use_keys(socket, credentials)
        self._monitor: zmq.Socket[bytes] | None = socket.get_monitor_socket(_WATCHED)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise SchedulerError(
                f"{address!r} is not the address of a scheduler ({error.strerror}); give one as in tcp://127.0.0.1:5555"
            ) from error

    def send(self, frame: bytes) -> bool:
        """Send ``frame``; return False if there is no connection to send it over."""
        try:
            self.socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:  # libzmq gave the connection up, or holds as many unsent requests as it may
            return False
        return True

    def receive(self, seconds: float) -> m.Reply | e.Reply | None:
        """Return the next reply, if one comes within ``seconds``.

        Raises:
            SchedulerError: the frame is no reply of this protocol, or of another version of it.
        """
        if not self.socket.poll(max(0, int(seconds * 1000) + 1)):
            return None
        try:
            reply = m.decode_reply(self.socket.recv())
        except m.WrongVersion as error:
            raise SchedulerError(
                f"the scheduler at {self.address} speaks version {error.version} of the protocol, this side version "
                f"{m.VERSION}; install the same lightning-sdpipe on both"
            ) from error
        except m.MalformedFrame as error:
            raise SchedulerError(f"the program at {self.address} is not a scheduler ({error})") from error
        self.heard_at = time.monotonic()
        self._close_monitor()  # which has no more to say
        return reply

    def check(self) -> None:
        """Check whether the monitor knows by now that no reply will come.

        Raises:
            SchedulerError: the keys do not belong together.
        """
        monitor = self._monitor
        while monitor is not None and self._verdict is None and monitor.poll(0):
            event = recv_monitor_message(monitor)
            self._hear(event["event"])
        if self._failures >= TRIES and self._greeted:
            self._verdict = (
                "it has another key than the one that this worker.key was made for, or none; give the worker.key "
                "that was made with its scheduler.key"
                if self._has_keys
                else "it asks for a key (give its worker.key), or it is no scheduler"
            )
        elif self._failures >= TRIES and _greets(self.address):
            self._greeted, self._failures = True, 0  # those so far may be a proxy's
        if self._verdict is not None:
            raise SchedulerError(f"no connection to the scheduler at {self.address}: {self._verdict}")

    def silence(self) -> str:
        """Describe what is known about why no answer came."""
        if self._speaks:
            return (
                "a program there speaks ZeroMQ but does not answer: is it a scheduler that runs, and is this worker of "
                "another run connected to it?"
            )
        if self._listens or self._failures:
            return (
                "a program there accepts connections but does not speak ZeroMQ: is this the scheduler's port, or a "
                "proxy or tunnel to a scheduler that does not run?"
            )
        return "nothing listens there: check the address, and that it runs and can be reached (firewalls)"

    def close(self) -> None:
        """Free the socket; safe to call twice."""
        self._close_monitor()
        self.socket.close(0)

    def _close_monitor(self) -> None:
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None

    def _hear(self, event: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._listens = True
        elif event == zmq.EVENT_CLOSED:
            self._listens = False
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._speaks, self._failures = True, 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._verdict = "it does not let this key in; give the worker.key that was made with its scheduler.key"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._verdict = (
                "it has no keys, and this side has; start it with --key-file, or leave the key out here"
                if self._has_keys
                else "it asks for a key; give the worker.key that was made with its scheduler.key"
            )
        else:
            self._failures += 1


def _greets(address: str) -> bool:
    """Return whether the program at ``address`` speaks first, as ZeroMQ does. A proxy that cannot reach its target
    closes the connection instead; only TCP has proxies."""
    if not address.startswith("tcp://"):
        return True
    host, port = host_and_port(address)
    try:
        with sockets.create_connection((host, int(port)), GREETING) as connection:
            return connection.recv(1) == _GREETING
    except OSError:
        return False


def use_keys(socket: zmq.Socket[bytes], credentials: WorkerKeys) -> None:
    """Make ``socket`` encrypt, and connect with ``credentials`` only."""
    socket.curve_serverkey = credentials.scheduler_public.encode()
    socket.curve_publickey = credentials.public.encode()
    socket.curve_secretkey = credentials.secret.encode()


def check_credentials(address: str, credentials: WorkerKeys | None) -> None:
    """Refuse to talk to another machine without keys.

    Raises:
        ConfigurationError: ``address`` is on another machine, and there are no keys, or it has no such port.
    """
    check_port(address)
    if credentials is None and not is_loopback(address):
        raise ConfigurationError(
            f"the scheduler at {address} is on another machine and answers no program without keys; "
            "give the worker.key that `sdpipe keygen` made for it"
        )


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
    """The run is over: it has failed, or all pipelines have finished."""

    def __init__(self, end: e.End) -> None:
        super().__init__(end.reason if end.worker is None else str(end))


class CancelledError(SchedulerError):
    """The wait was cancelled, since its result is no longer needed."""


def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Callbacks:
    """Functions that the client's thread calls, and that must return quickly: for each new epoch, when the exchange of
    the group of that number is stuck, and when this process must end or the run is over."""

    epoch: Callable[[Epoch], None] = _nothing
    broke: Callable[[int], None] = _nothing
    ends: Callable[[e.End], None] = _nothing


class Wire:
    """Connects ``talk`` to the scheduler at ``address``, and starts its heartbeats; a wait lasts ``timeout`` seconds at
    most, unless it is given another limit."""

    def __init__(
        self, address: str, talk: c.Conversation, told: Callbacks, timeout: float, credentials: WorkerKeys | None
    ) -> None:
        self.talk, self.told, self.timeout = talk, told, timeout
        self.on_invitation: Callable[[Group, int | None], None] = _nothing
        """Called in the thread, too, with each group that the worker is a passive member of, and the last iteration
        that was answered before (None if none since the worker joined)."""
        self.changed = threading.Condition()
        """Guards the conversation and the replies; notified of every reply."""
        self._address = address
        self._replies: dict[c.Key, m.Reply | e.Reply | None] = {}
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
        self._of_training.socket.setsockopt(zmq.SNDHWM, 0)  # a wait while the scheduler is away repeats its request
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._awake, False)
        os.set_blocking(self._wake, False)
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name="scheduler client", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def talking(self) -> Iterator[c.Conversation]:
        """Give this thread exclusive use of the conversation; messages that fall due inside the block are sent at
        once."""
        with self.changed:
            before = self.talk.deadline
            yield self.talk
            due = self.talk.deadline
        if due < before or due <= time.monotonic():
            self._rouse()

    def ask(self, kind: c.Kind, *fields: Any) -> c.Key:
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
        kind: c.Kind,
        *fields: Any,
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Any:
        """Ask, and :meth:`wait` for ``what``."""
        return self.wait(self.ask(kind, *fields), what, timeout, cancelled)

    def wait(
        self,
        key: c.Key,
        what: str,
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> Any:
        """Return the reply to the request ``key``; the error names ``what`` if none comes. See :meth:`comes`.

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
        key: c.Key,
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

    def take(self, key: c.Key) -> m.Reply | e.Reply | None:
        """Return the reply to the request ``key``, if it has come, and no longer wait for it."""
        with self.changed:
            return self._replies.pop(key, None)

    def check(self, key: c.Key = ("any", "")) -> None:
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

    def _listen(self, key: c.Key, seconds: float) -> None:
        """Wait at most ``seconds`` for a reply, perhaps that to the request ``key``."""
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
        reply = connection.receive(min(seconds, c.REPEAT_IN_TRAINING))
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
        if heard := [at for at in (self._connection.heard_at, self._of_training.heard_at) if at is not None]:
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
                if isinstance(effect, c.Replied) and effect.key in self._replies:
                    self._replies[effect.key] = effect.reply
                elif isinstance(effect, c.Replied) and isinstance(effect.reply, e.Refused):
                    log.error("the scheduler at %s refused: %s", self._address, effect.reply.reason)
            self.changed.notify_all()
        self._carry_out(effects)

    def _carry_out(self, effects: Sequence[c.Effect]) -> None:
        for effect in effects:
            match effect:
                case c.EpochBegan(epoch):
                    self.told.epoch(epoch)
                case c.GroupBroke(sequence):
                    self.told.broke(sequence)
                case c.Connect(port, nonce):
                    self._connect(port, nonce)
                case e.End():
                    self.told.ends(effect)
                case m.Invitation(group, after):
                    self.on_invitation(group, after)
                case c.Warned(text):
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
        except Exception as error:  # without heartbeats this process has no place in the run
            reason = f"its thread that talks to the scheduler ended with {type(error).__name__}: {error}"
            self._hear(e.Now(0, over=e.End(reason, True, True, self.talk.worker)))
            raise
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


def ask_status(address: str, *, credentials: WorkerKeys | None = None, timeout: float = 5.0) -> Status:
    """Return the state of the run that the scheduler at ``address`` serves; raise as :func:`ask` does."""
    return ask(m.Ask("status"), m.StatusReply, address, credentials=credentials, timeout=timeout).status


def ask(
    question: m.Ask, answer: type[_Answer], address: str, *, credentials: WorkerKeys | None = None, timeout: float = 5.0
) -> _Answer:
    """Return the scheduler's answer to a program other than a worker.

    Raises:
        SchedulerError: no answer comes in time, or the program that answers is no scheduler of this version.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    connection = None
    try:
        connection = Connection(context, address, credentials)
        until, asked = time.monotonic() + timeout, 0
        while (left := until - time.monotonic()) > 0:
            if asked < 2 and left <= timeout * (1 - asked / 2):
                connection.send(m.encode(question))
                asked += 1
            reply = connection.receive(min(left, GLANCE))
            connection.check()
            if isinstance(reply, answer):
                return reply
        raise SchedulerError(f"the scheduler at {address} did not answer within {timeout:g} s; {connection.silence()}")
    finally:
        if connection is not None:
            connection.close()
        context.destroy(linger=0)  # with any socket that could not become a connection
