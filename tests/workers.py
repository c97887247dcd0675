"""Runs a function in several processes that are connected by gloo; and a port for other processes."""

from __future__ import annotations

import io
import multiprocessing
import socket
import tempfile
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_sdpipe import openmp
from lightning_sdpipe.worker.launching import environment
from tests.patience import limit

holds = True
"""Whether a rank whose work is over holds its connections until all have ended; it must not after an error that the
others shall hear of."""
AFTER_A_FAILURE = 5.0  # seconds for the others to say what they saw of it


def free_port() -> int:
    """That no connection will get in the meantime, and a port that was asked of the system might be."""
    port = environment.free_port()
    assert port is not None
    return port


def listening(port: int | None = None) -> list[str]:
    """The addresses at which this process listens for TCP connections: at ``port``, or at any."""
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
    """What ``work(rank, *arguments)`` returns on each of ``count`` ranks, None for those that get ``lost`` without a
    word; raises what the first failing one raised."""
    context, timeout = multiprocessing.get_context("fork"), limit()
    with tempfile.TemporaryDirectory() as directory:
        pipes = [context.Pipe() for _ in range(count)]
        processes = [
            context.Process(target=_worker, args=(rank, count, directory, timeout, send, work, arguments))
            for rank, (_, send) in enumerate(pipes)
        ]
        openmp.end_threads()
        for process in processes:
            process.start()
        try:
            outcomes = _outcomes({rank: receive for rank, (receive, _) in enumerate(pipes) if rank not in lost})
            for rank in lost:
                processes[rank].join()
        finally:
            for receive, _ in pipes:
                receive.send_bytes(b"all have ended")
            for process in processes:
                process.join(1)
                if process.is_alive():
                    process.kill()
                    process.join()
    errors = [value for ok, value in outcomes.values() if not ok]
    if errors:
        raise AssertionError("\n".join(errors))
    return [outcomes[rank][1] if rank in outcomes else None for rank in range(count)]


def _outcomes(pipes: dict[int, Connection]) -> dict[int, tuple[bool, Any]]:
    """Of each rank; once one has failed, of those that end soon after it."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    seconds: float | None = None
    while waiting := [rank for rank in pipes if rank not in outcomes]:
        ready = connection.wait([pipes[rank] for rank in waiting], seconds)
        for rank in waiting:
            if pipes[rank] in ready:
                outcomes[rank] = torch.load(io.BytesIO(pipes[rank].recv_bytes()), weights_only=False)
        if not ready:
            break
        if not all(ok for ok, _ in outcomes.values()):
            seconds = limit(AFTER_A_FAILURE).total_seconds()
    return outcomes


def _worker(
    rank: int,
    count: int,
    directory: str,
    timeout: timedelta,
    send: Connection,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=count, timeout=timeout
        )
        dist.barrier()  # a rank with nothing to do would close its connections while another still makes them
        outcome = True, work(rank, *arguments)
    except BaseException:
        outcome = False, f"rank {rank}: {traceback.format_exc()}"
    buffer = io.BytesIO()  # by value: tensors in shared memory would vanish with this process
    torch.save(outcome, buffer)
    send.send_bytes(buffer.getvalue())
    if outcome[0] and holds:
        send.poll(None)  # a rank that closes its connections ends a group that another still makes
    if dist.is_initialized():
        dist.destroy_process_group()
