"""A connection between two process groups of gloo that is lost when so many bytes have passed: amid a message."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tests.exchange.threads import together
from tests.patience import limit

_CONNECTS, _RELAYS, _LISTENS = "127.0.0.9", "127.0.0.2", "127.0.0.1"  # gloo connects from the greater address


@contextmanager
def lost_after(count: int, sender: int, timeout: timedelta | None = None) -> Iterator[list[Any]]:
    """The groups of ranks 0 and 1, for two threads; their connection ends when ``sender`` has sent so many bytes."""
    with socket.create_server((_RELAYS, 0)) as listener:
        store = dist.HashStore()  # type: ignore[attr-defined]
        relayed = _Relayed(store, listener.getsockname()[1])
        hosts, stores = (_LISTENS, _CONNECTS), (store, relayed)

        def make(rank: int) -> Any:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout or limit()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=hosts[rank])]
            return dist.ProcessGroupGloo(stores[rank], rank, 2, options)

        def relay() -> None:
            connecting, _ = listener.accept()
            with connecting, _connected(relayed.port) as listening:
                ends = (listening, connecting)
                back = threading.Thread(target=_pump, args=(ends[1 - sender], ends[sender], None))
                back.start()
                _pump(ends[sender], ends[1 - sender], count)
                for end in ends:
                    with suppress(OSError):  # it has closed the connection
                        end.shutdown(socket.SHUT_RDWR)
                back.join()

        thread = threading.Thread(target=relay, daemon=True)
        thread.start()
        groups = together(2, make)
        yield groups
        groups.clear()


def _connected(port: int) -> socket.socket:
    """A connection to the rank that listens, or is about to."""
    while True:
        try:
            return socket.create_connection((_LISTENS, port))
        except ConnectionRefusedError:
            time.sleep(0.1)


def _pump(source: socket.socket, target: socket.socket, most: int | None) -> None:
    passed = 0
    with suppress(OSError):
        while (most is None or passed < most) and (data := source.recv(2**16 if most is None else most - passed)):
            target.sendall(data)
            passed += len(data)


class _Relayed(Store):
    """A store whose values name the ``relay``'s port for the one at which rank 0 listens."""

    def __init__(self, store: Store, relay: int) -> None:
        super().__init__()
        self._store, self._relay = store, relay
        self.port = 0

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        # The first address of an IPv4 socket is the value's; behind it there is memory as gloo found it.
        where = re.search(rb"\x02\0(..)(.{4})\0{8}", value, re.DOTALL)
        if where is not None and where[2] == socket.inet_aton(_LISTENS):
            (self.port,) = struct.unpack(">H", where[1])
            mine = struct.pack("=H", socket.AF_INET) + struct.pack(">H", self._relay) + socket.inet_aton(_RELAYS)
            value = value.replace(where[0], mine + bytes(8), 1)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout or limit())

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)
