"""Runs a function in several processes, connected by gloo, on this machine or in its network namespaces."""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_sdpipe import openmp
from recipes.harness import namespaces

Result = TypeVar("Result")
TRANSFER_TIMEOUT = timedelta(minutes=10)
PATIENCE = 1800.0
"""Most seconds that processes may take by default, on a busy machine."""
AFTER_A_FAILURE = 5.0
"""Seconds in which other ranks may report what they saw of a rank's failure."""
_GRACE_SECONDS = 2.0

holds = True
"""Whether a finished rank keeps its connections until all have finished, since closing one ends a group that others are
still making. A rank sets this to False after an error that the others should notice."""


def run_processes(
    count: int,
    work: Callable[..., Result],
    *arguments: Any,
    transfer_timeout: timedelta = TRANSFER_TIMEOUT,
    **waits: Any,
) -> list[Result]:
    """Do what :func:`in_processes` does, with ranks connected by gloo."""
    with tempfile.TemporaryDirectory() as directory:
        connected = partial(_connected, [], f"file://{directory}/store", count, transfer_timeout, work)
        return in_processes(count, connected, *arguments, **waits)


def run_on_hosts(
    hosts: Sequence[str], port: int, work: Callable[..., Result], *arguments: Any, timeout: float
) -> list[Result]:
    """Do what :func:`run_processes` does, with a rank on each of ``hosts``, whose names may repeat. Host 0 listens at
    ``port``, and a transfer may take half of ``timeout``."""
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
    dist.barrier()  # a rank with nothing to do would close its connections while another is still making them
    return work(rank, *arguments)


def be_rank(rank: int, count: int, port: int | None, **more: object) -> None:
    """Set the environment variables that torchrun sets for a rank, with all ranks on this machine, and ``more``."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "harness"}
    os.environ |= {name: str(value) for name, value in (place | meet | more).items()}


def hook(owner: Any, name: str, does: Callable[..., object], after: bool = False) -> None:
    """Call ``does``, with the same arguments, before or after each call of function ``name`` of a class or module, in
    this process, until it ends."""
    whole = getattr(owner, name)

    def hooked(*arguments: Any, **more: Any) -> Any:
        if not after:
            does(*arguments, **more)
        outcome = whole(*arguments, **more)
        if after:
            does(*arguments, **more)
        return outcome

    setattr(owner, name, hooked)


def in_processes(
    count: int,
    work: Callable[..., Result],
    *arguments: Any,
    timeout: float = PATIENCE,
    lost: Collection[int] = (),
    after_failure: float = AFTER_A_FAILURE,
) -> list[Result]:
    """Return what ``work(rank, *arguments)`` returns on each of ``count`` ranks.

    The processes are forked, so that they share what this one has imported, and compute with one thread each. None
    is left when this returns or raises.

    Args:
        count: world size.
        work: the function; its result is pickled, with the values of tensors.
        arguments: arguments after the rank.
        timeout: seconds for everything.
        lost: ranks that may die; a rank that does gets None as its result.
        after_failure: seconds in which other ranks may report what they saw of a rank's failure.

    Raises:
        RuntimeError: ranks raised or died; the message has the tracebacks.
        TimeoutError: a rank was not done in time.
    """
    context = multiprocessing.get_context("fork")
    openmp.end_threads()
    with ExitStack() as stack:
        ranks: dict[Any, int] = {}
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_run, args=(there, rank, work, arguments))
            process.start()
            there.close()  # only the child holds it now, so its death is an end of file here
            stack.push(lambda error, *_, process=process: _end(process, error is not None))
            ranks[stack.enter_context(here)] = rank
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while waiting := [pipe for pipe, rank in ranks.items() if rank not in results | errors]:
            ready: list[Any] = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = ranks[pipe]
                try:
                    good, outcome = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
                except EOFError:
                    good, outcome = rank in lost, None if rank in lost else f"rank {rank} died before it was done"
                (results if good else errors)[rank] = outcome
                if len(errors) == 1 and not good:
                    deadline = min(deadline, time.monotonic() + after_failure)
        if errors:
            raise RuntimeError("\n".join(errors.values()))
        if waiting:
            left = [ranks[pipe] for pipe in waiting]
            raise TimeoutError(f"ranks {left} of {count} were not done within {timeout} s")
        for pipe in ranks:
            with suppress(OSError):  # the rank may not wait for this
                pipe.send_bytes(b"all are done")
    return [results[rank] for rank in range(count)]


def _end(process: BaseProcess, error: bool) -> None:
    process.join(0.0 if error else _GRACE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()


def _run(pipe: Connection, rank: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        outcome: tuple[bool, Any] = True, work(rank, *arguments)
    except BaseException:
        outcome = False, f"rank {rank} failed:\n{traceback.format_exc()}"
    message = io.BytesIO()  # by value: tensors in shared memory would vanish with this process
    torch.save(outcome, message)
    pipe.send_bytes(message.getvalue())
    if outcome[0] and holds:
        pipe.poll(None)
    if dist.is_initialized():
        dist.destroy_process_group()
