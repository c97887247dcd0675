"""A plain TCP connection per process of a run: when it closes, the process has ended.

libzmq reconnects by itself and does not say when a peer is gone, so the kernel is asked: it closes the connections of a
process however that ends, within milliseconds. A process that connects says the nonce that it got over ZeroMQ,
encrypted with the keys of the run; nothing else is read, and nothing is ever sent. A connection that says anything
else, or nothing in time, is closed, so strangers hold few descriptors.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket as sockets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import zmq

from lightning_sdpipe.policies.events import Worker

NONCE_BYTES = 16
MOST_LINES = 1 << 16
SPEAKS_WITHIN = 10.0
"""Most seconds from the connection to the nonce."""
MAX_SILENT = 64
"""Most connections that have not said their nonce; one more closes the oldest. A process says its nonce at once."""


class Lines:
    """Nonces that processes were given; :meth:`knows` may be called from another thread."""

    def __init__(self) -> None:
        self.port = 0
        """Port on which :class:`Lifelines` listens; 0 until it does."""
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
    the ``endpoint`` of the server's loop, where its socket is known as ``identity``. ``knows`` says whether a process
    of the run was given a nonce; the thread of this object calls it.

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
        knows: Callable[[bytes], bool],
    ) -> None:
        family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
        self._listener = sockets.create_server((host, port), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._context, self._endpoint, self._identity, self._knows = context, endpoint, identity, knows
        self._dismissed, self._dismiss = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._nonces: dict[sockets.socket, bytes] = {}
        self._silent: dict[sockets.socket, float] = {}
        self._thread = threading.Thread(target=self._run, name="scheduler lifelines", daemon=True)

    def __enter__(self) -> Lifelines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._dismiss)
        self._thread.join()
        os.close(self._dismissed)
        self._selector.close()
        self._listener.close()
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
        except OSError:
            data = b""
        said = len(data) == NONCE_BYTES  # a nonce fits into any segment
        if connection in self._silent and said and self._knows(data):
            del self._silent[connection]
            self._nonces[connection] = data
            return b""
        nonce = self._nonces.get(connection, b"")
        self._drop(connection)
        return nonce

    def _drop(self, connection: sockets.socket) -> None:
        self._selector.unregister(connection)
        self._silent.pop(connection, None)
        self._nonces.pop(connection, None)
        connection.close()
