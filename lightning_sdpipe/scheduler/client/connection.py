"""A client's socket, and what libzmq can tell about why no reply comes.

ZeroMQ connects in the background and for ever: a wrong address, a wrong key and a scheduler that is about to start look
alike, namely like silence. Its monitor of a socket knows more: whether anything listens, and how a handshake failed.
"""

from __future__ import annotations

import socket as sockets
import time
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightning_sdpipe.errors import ConfigurationError, SchedulerError
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.credentials import WorkerKeys, host_and_port, is_loopback
from lightning_sdpipe.scheduler.log.status import Status

GLANCE = 0.1
"""Seconds between checks of the monitor, until an answer has come."""

TRIES = 3
"""Handshakes that must fail before the keys are blamed; a scheduler that is just ending fails one, too."""

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
                f"{address!r} is no address of a scheduler ({error.strerror}); give one as in tcp://127.0.0.1:5555"
            ) from error

    def send(self, frame: bytes) -> bool:
        """Send ``frame``; return False if there is no connection to send it over."""
        try:
            self.socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:  # libzmq gave the connection up, or holds a thousand unsent requests
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
            raise SchedulerError(f"the program at {self.address} is no scheduler ({error})") from error
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
        if self._failures >= TRIES and not self._greeted:
            self._greeted = _greets(self.address)  # and the next failure counts: those before may be a proxy's
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
            if self._greeted:
                self._verdict = (
                    "it has another key than the one that this worker.key was made for, or none; give the worker.key "
                    "that was made with its scheduler.key"
                    if self._has_keys
                    else "it asks for a key (give its worker.key), or it is no scheduler"
                )


def _greets(address: str) -> bool:
    """Return whether the program at ``address`` speaks first, as ZeroMQ does. A proxy that cannot reach its target
    closes the connection instead; there is none but over TCP."""
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
        ConfigurationError: ``address`` is on another machine, and there are no keys.
    """
    if credentials is None and not is_loopback(address):
        raise ConfigurationError(
            f"the scheduler at {address} is on another machine and answers no program without keys; "
            "give the worker.key that `sdpipe keygen` made for it"
        )


def ask_status(address: str, *, credentials: WorkerKeys | None = None, timeout: float = 5.0) -> Status:
    """Return the state of the run that the scheduler at ``address`` serves; raise as :func:`ask` does."""
    return ask(m.Ask("status"), m.StatusReply, address, credentials=credentials, timeout=timeout).status


def ask(
    question: m.Ask, answer: type[_Answer], address: str, *, credentials: WorkerKeys | None = None, timeout: float = 5.0
) -> _Answer:
    """Return the scheduler's answer to a program that is no worker.

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
