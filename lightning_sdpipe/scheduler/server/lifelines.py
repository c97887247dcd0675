"""A plain TCP connection per process of a run: when it closes, the process has ended.

libzmq reconnects by itself and does not say when a peer is gone, so the kernel is asked: it closes the connections of a
process however that ends, within milliseconds. A process that connects says the nonce that it got over ZeroMQ,
encrypted with the keys of the run; nothing else is read, and nothing is ever sent. A connection that says anything
else, or nothing in time, is closed, so strangers hold few descriptors.

The kernel of the other machine also answers for a process that is silent because it is stopped, or a long call holds
the GIL: TCP's keepalive asks it, and :meth:`Lines.answers` reads when it last replied. A connection that the kernel
gives up for want of replies does not mean that a process has ended: networks come back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket as sockets
import struct
import threading
import time
from collections import OrderedDict

import zmq

from lightning_sdpipe.policies.events import Worker

NONCE_BYTES = 16
MOST_LINES = 1 << 16
SPEAKS_WITHIN = 10.0
"""Most seconds from the connection to the nonce."""
MAX_SILENT = 64
"""Most connections that have not said their nonce; one more closes the oldest. A process says its nonce at once."""
PROBES_PER_LIMIT, MOST_PROBES = 8, 127
_OUT_OF_REACH = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
_LAST_REPLY = 56
"""Offset in Linux's ``tcp_info`` of the milliseconds since the peer's kernel last acknowledged anything."""
LEAST_SILENCE = 3.0
"""Seconds in which a machine has three chances to reply, as it is asked once a second at most."""


class Lines:
    """Nonces that processes were given, and their connections; :class:`Lifelines` uses it from another thread."""

    def __init__(self) -> None:
        self.port = 0
        """Port on which :class:`Lifelines` listens; 0 until it does."""
        self.connections: dict[bytes, sockets.socket] = {}
        """Open connections by nonce."""
        self._given: OrderedDict[bytes, tuple[Worker, int]] = OrderedDict()

    def give(self, worker: Worker, incarnation: int) -> bytes:
        """Draw a nonce for that process."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._given[nonce] = worker, incarnation
        while len(self._given) > MOST_LINES:
            self._given.popitem(last=False)
        return nonce

    def knows(self, nonce: bytes) -> bool:
        """Return whether ``nonce`` was given to a process whose connection has not closed yet."""
        return nonce in self._given

    def answers(self, worker: Worker, incarnation: int, within: float) -> bool:
        """Return whether that process, running or stopped, is on a machine that can be reached: one that has replied on
        its connection in the last ``within`` seconds, or :data:`LEAST_SILENCE` if that is more."""
        for nonce, connection in list(self.connections.items()):
            if self._given.get(nonce) == (worker, incarnation):
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _LAST_REPLY + 4)
                    (milliseconds,) = struct.unpack_from("=I", info, _LAST_REPLY)
                    return bool(milliseconds < 1000 * max(within, LEAST_SILENCE))
        return False

    def take(self, nonce: bytes) -> tuple[Worker, int] | None:
        """Return the process that was given ``nonce`` and whose connection has closed, and forget the nonce."""
        return self._given.pop(nonce, None)

    def forget(self, pipeline: int, incarnation: int) -> None:
        """Forget the nonces of that start of ``pipeline``, which is over."""
        for nonce, (worker, number) in [*self._given.items()]:
            if (worker.pipeline, number) == (pipeline, incarnation):
                del self._given[nonce]


class Lifelines:
    """Listens at ``host`` and ``port`` (0: any), and sends the nonce of each connection that has closed, as a frame, to
    the ``endpoint`` of the server's loop, where its socket is known as ``identity``. Each machine is asked every
    eighth of ``limit`` seconds whether it is there; ``lines`` learns of the connections.

    Raises:
        OSError: the port cannot be listened on.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        endpoint: str,
        identity: bytes,
        lines: Lines,
        limit: float,
    ) -> None:
        family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
        self._listener = sockets.create_server((host, port), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._context, self._endpoint, self._identity = context, endpoint, identity
        self._lines, self._every = lines, max(1, int(limit / PROBES_PER_LIMIT))
        self._dismissed, self._dismiss = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._nonces: dict[sockets.socket, bytes] = {}
        self._silent: dict[sockets.socket, float] = {}
        self._thread = threading.Thread(target=self._run, name="scheduler lifelines", daemon=True)

    def __enter__(self) -> Lifelines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._dismiss, b"\0")  # closing it would go unnoticed while a fork holds it, too
        self._thread.join()
        os.close(self._dismiss)
        os.close(self._dismissed)
        self._selector.close()
        self._listener.close()
        self._lines.connections.clear()
        for connection in [*self._nonces, *self._silent]:
            connection.close()

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._dismissed, selectors.EVENT_READ)
        with self._context.socket(zmq.DEALER) as notifier:
            notifier.setsockopt(zmq.ROUTING_ID, self._identity)
            notifier.setsockopt(zmq.LINGER, 0)
            notifier.connect(self._endpoint)
            while True:
                for key, _ in self._selector.select(1.0 if self._silent else None):
                    if key.fileobj == self._dismissed:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._silent or key.fileobj in self._nonces:  # else it was just closed
                        nonce = self._read(key.fileobj)
                        if nonce:
                            notifier.send(nonce)
                now = time.monotonic()
                for connection in [late for late, until in self._silent.items() if until <= now]:
                    self._drop(connection)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the peer may be gone again
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
            for option in (sockets.TCP_KEEPIDLE, sockets.TCP_KEEPINTVL):
                connection.setsockopt(sockets.IPPROTO_TCP, option, self._every)
            connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, MOST_PROBES)
            if len(self._silent) >= MAX_SILENT:
                self._drop(next(iter(self._silent)))
            self._silent[connection] = time.monotonic() + SPEAKS_WITHIN
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: sockets.socket) -> bytes:
        """Return the nonce of ``connection`` if it has closed, else nothing."""
        try:
            data = connection.recv(NONCE_BYTES + 1)
        except BlockingIOError:
            return b""
        except OSError as error:
            if error.errno in _OUT_OF_REACH:
                self._drop(connection)
                return b""
            data = b""
        said = len(data) == NONCE_BYTES  # a nonce fits into any segment
        if connection in self._silent and said and self._lines.knows(data):
            del self._silent[connection]
            self._nonces[connection] = data
            self._lines.connections[data] = connection
            return b""
        nonce = self._nonces.get(connection, b"")
        self._drop(connection)
        return nonce

    def _drop(self, connection: sockets.socket) -> None:
        self._selector.unregister(connection)
        self._silent.pop(connection, None)
        self._lines.connections.pop(self._nonces.pop(connection, b""), None)
        connection.close()
