"""Runs a function in several processes that are connected by gloo; and a port for other processes."""

from __future__ import annotations

import io
import multiprocessing
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_workers(
    count: int, work: Callable[..., Any], *arguments: Any, timeout: float = 50, lost: Collection[int] = ()
) -> list[Any]:
    """What ``work(rank, *arguments)`` returns on each of ``count`` ranks, None for those that get ``lost`` without a
    word; raises what the first failing one raised."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        processes = [
            context.Process(target=_worker, args=(rank, count, directory, send, work, arguments))
            for rank, (_, send) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        try:
            deadline = time.monotonic() + timeout
            outcomes = []
            for rank, (receive, _) in enumerate(pipes):
                if rank not in lost and not receive.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"rank {rank} did not finish within {timeout} s")
                if rank in lost:
                    processes[rank].join(max(0.0, deadline - time.monotonic()))
                    outcomes.append((True, None))
                else:
                    outcomes.append(torch.load(io.BytesIO(receive.recv_bytes()), weights_only=False))
        finally:
            for process in processes:
                process.join(1)
                if process.is_alive():
                    process.kill()
                    process.join()
    errors = [value for ok, value in outcomes if not ok]
    if errors:
        raise AssertionError("\n".join(errors))
    return [value for _, value in outcomes]


def _worker(
    rank: int,
    count: int,
    directory: str,
    send: Connection,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=20),
        )
        outcome = True, work(rank, *arguments)
    except BaseException:
        outcome = False, f"rank {rank}: {traceback.format_exc()}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    buffer = io.BytesIO()  # by value: tensors in shared memory would vanish with this process
    torch.save(outcome, buffer)
    send.send_bytes(buffer.getvalue())
