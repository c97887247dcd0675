"""A process's end of its lifeline: a connection that does nothing but close when the process ends.

A process that is forked would keep it open: data loaders fork, and outlive a parent that is killed. So children close
their copy first of all.
"""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import weakref

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

    def close(self) -> None:
        """Which says that the process has ended; safe to call twice."""
        _open.discard(self)
        self.socket.close()


def _close_in_child() -> None:
    for line in list(_open):
        with contextlib.suppress(OSError):
            line.socket.close()


os.register_at_fork(after_in_child=_close_in_child)
