"""Run a function in several processes that gloo connects, and find ports for other processes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from lightning_sdpipe.worker.launching import environment
from recipes.harness.processes import AFTER_A_FAILURE, run_processes
from tests.patience import limit


def free_port() -> int:
    """Return a free port outside of the range from which the kernel takes those of connections."""
    port = environment.free_port()
    assert port is not None
    return port


def listening(port: int | None = None) -> list[str]:
    """Return the addresses at which this process listens for TCP connections: those at ``port``, or all."""
    links = [entry.resolve().name for entry in Path("/proc/self/fd").iterdir()]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            number, _, at_port = local.partition(":")
            if state == "0A" and rest[5] in own and port in (None, int(at_port, 16)):
                words = bytes.fromhex(number)
                address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, address))
    return sorted(found)


def run_workers(count: int, work: Callable[..., Any], *arguments: Any, lost: Collection[int] = ()) -> list[Any]:
    """Return what ``work(rank, *arguments)`` returns on each of ``count`` ranks; None for those of ``lost`` that die.
    Raise what ranks raised. A transfer may take as long as :func:`~tests.patience.limit` allows."""
    seconds = limit(AFTER_A_FAILURE).total_seconds()
    return run_processes(count, work, *arguments, transfer_timeout=limit(), lost=lost, after_failure=seconds)
