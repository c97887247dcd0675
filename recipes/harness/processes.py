"""A function in several processes that gloo connects, on this machine or on hosts that are namespaces of it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from recipes.harness import namespaces

Result = TypeVar("Result")
TRANSFER_TIMEOUT = timedelta(minutes=10)
PATIENCE = 1800.0
"""Seconds that processes may take by default, on a machine with much else to do as well."""
_GRACE_SECONDS = 2.0


def run_processes(count: int, work: Callable[..., Result], *arguments: Any, timeout: float = PATIENCE) -> list[Result]:
    """Works as :func:`in_processes`, of ranks that gloo connects."""
    with tempfile.TemporaryDirectory() as directory:
        connected = partial(_connected, [], f"file://{directory}/store", count, TRANSFER_TIMEOUT, work)
        return in_processes(count, connected, *arguments, timeout=timeout)


def run_on_hosts(
    hosts: Sequence[str], port: int, work: Callable[..., Result], *arguments: Any, timeout: float
) -> list[Result]:
    """Works as :func:`run_processes`, with a rank on each of ``hosts``, whose names may repeat. The first of all
    namespaces listens at ``port``, and a transfer may take half of ``timeout``."""
    store, limit = f"tcp://{namespaces.address(0)}:{port}", timedelta(seconds=timeout / 2)
    placed = partial(_connected, hosts, store, len(hosts), limit, work)
    return in_processes(len(hosts), placed, *arguments, timeout=timeout)


def _connected(
    hosts: Sequence[str],
    store: str,
    count: int,
    limit: timedelta,
    work: Callable[..., Result],
    rank: int,
    *arguments: Any,
) -> Result:
    if hosts:
        namespaces.enter(hosts[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = namespaces.INTERFACE
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=limit)
    return work(rank, *arguments)


def in_processes(count: int, work: Callable[..., Result], *arguments: Any, timeout: float) -> list[Result]:
    """Return what ``work(rank, *arguments)`` returns on each of ``count`` ranks.

    The processes are forked, so that they share what this one has imported, and compute with one thread each. None
    is left when this returns or raises.

    Args:
        count: world size.
        work: its result must not hold tensors.
        arguments: passed to it after the rank.
        timeout: seconds for everything.

    Raises:
        RuntimeError: a rank raised, with its traceback, or died.
        TimeoutError: a rank was not done in time.
    """
    context = multiprocessing.get_context("fork")
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        pending: dict[Any, int] = {}
        for rank in range(count):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(send, rank, work, arguments), daemon=True)
            process.start()
            send.close()  # the child alone holds it, so its death is an end of file here
            stack.push(lambda error, *_, process=process: _end(process, error is not None))
            pending[stack.enter_context(receive)] = rank
        results: dict[int, Result] = {}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(pending.values())} of {count} were not done within {timeout} s")
            for connection in ready:
                rank = pending.pop(connection)
                results[rank] = _result(connection, rank)
    return [results[rank] for rank in range(count)]


def _result(connection: Any, rank: int) -> Any:
    try:
        good, outcome = connection.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} died before it was done") from None
    if not good:
        raise RuntimeError(f"rank {rank} failed:\n{outcome}")
    return outcome


def _end(process: BaseProcess, error: bool) -> None:
    process.join(0.0 if error else _GRACE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()


def _run(send: Connection, rank: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        outcome: tuple[bool, Any] = True, work(rank, *arguments)
    except BaseException:
        outcome = False, traceback.format_exc()
    send.send(outcome)
    if dist.is_initialized():
        dist.destroy_process_group()
