"""The store through which the processes of one job find each other, bound to MASTER_ADDR.

torch's TCPStore asks for no key. By itself it also listens on every interface, so every machine that reaches this one
could read and change its contents. Here rank 0 gives it a socket that is bound to MASTER_ADDR alone: loopback for a run
on one machine, and the network between the machines, which has to be trusted, for a run on several.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store, default_pg_timeout

log = logging.getLogger(__name__)

_ANSWERS = 5.0  # seconds within which TCPStore itself gives up, after its timeout
_PATIENCE = 60.0  # seconds after which a rank says what it waits for
_OF_THE_AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun, whose agent listens at MASTER_PORT then


def open_store(
    host: str, port: int, rank: int, world_size: int, one_machine: bool, timeout: timedelta = default_pg_timeout
) -> Store:
    """Return this rank's store.

    Args:
        host: MASTER_ADDR, or the launcher's equivalent.
        port: that of rank 0.
        rank: that of this process.
        world_size: number of processes.
        one_machine: all of them run on this machine.
        timeout: that of each wait.

    Raises:
        OSError: the port is in use.
        RuntimeError: the store of rank 0 cannot be reached, or does not answer.
    """
    if world_size == 1:
        return HashStore()
    if rank > 0 or os.environ.get(_OF_THE_AGENT) == str(True):
        with _told(f"Rank {rank} waits for rank 0 at {host}:{port}", timeout):
            return _connected(host, port, world_size, timeout)
    options: dict[str, Any] = {"use_libuv": os.environ.get("USE_LIBUV", "1") == "1"}
    listener = listen(host, port, one_machine)
    if listener is not None:
        options["master_listen_fd"] = listener.detach()
    else:
        log.info(f"MASTER_ADDR={host} is no address of this machine, so the store listens on all of its interfaces")
    with _told(f"Rank 0 at {host}:{port} waits for the other processes of {world_size}", timeout):
        return TCPStore(host, port, world_size, True, timeout, **options)


@contextmanager
def _told(waits: str, timeout: timedelta) -> Iterator[None]:
    """Log what the block waits for, if it takes long."""
    said = f"{waits}, for {timeout.total_seconds():g} s at most. Has every machine been started (under SLURM, by srun)?"
    timer = threading.Timer(_PATIENCE, log.warning, [said])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _connected(host: str, port: int, world_size: int, timeout: timedelta) -> Store:
    """Return a client of the store of rank 0.

    A TCPStore itself would wait without a limit, and ignore Ctrl-C, if a program there accepts the connection and says
    nothing: another one than rank 0, or a rank 0 that is stopped. It may try for twice its timeout where nothing
    listens. So a thread makes it.
    """
    outcome: SimpleQueue[Store | Exception] = SimpleQueue()

    def connect() -> None:
        try:
            outcome.put(TCPStore(host, port, world_size, False, timeout))
        except Exception as error:
            outcome.put(error)

    threading.Thread(target=connect, name="connecting", daemon=True).start()
    seconds = timeout.total_seconds() + _ANSWERS
    try:
        came = outcome.get(timeout=seconds)
    except Empty:
        came = TimeoutError(f"no answer within {seconds:g} s")
    if isinstance(came, Exception):
        raise RuntimeError(f"MASTER_ADDR={host}, MASTER_PORT={port}: {_why_not(host, port)}") from came
    return came


def _why_not(host: str, port: int) -> str:
    """Return why the store of rank 0 was not reached there."""
    try:
        socket.create_connection((host, port), _ANSWERS).close()
    except OSError as error:
        return (
            f"rank 0 was not reached there ({error.strerror or error}). Check that its machine has been started, and "
            "that the address is one by which this machine reaches it."
        )
    return (
        "a program there has accepted a connection, and not answered as the store of rank 0. Check that rank 0 runs, "
        "and that the port is no other program's."
    )


def listen(host: str, port: int, one_machine: bool) -> socket.socket | None:
    """Return a socket bound to ``host``; None if that is not an address of this machine that the others reach.

    A host name may mean loopback on its own machine (/etc/hosts) and an outside address on the others.
    """
    for family, kind, protocol, _, address in _addresses(host, port):
        if is_loopback(address[0].partition("%")[0]) and not (one_machine or is_loopback(host)):
            continue
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            listener.close()
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            raise
        return listener
    return None


def _addresses(host: str, port: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return found  # type: ignore[return-value]


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is loopback on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
