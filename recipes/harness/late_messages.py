"""Emulated latency, which must be labelled as such: of messages between workers, and of connections to a distant
scheduler.

A message between workers is sent at once, over the real link, and its receiver gets it later by the latency. So
messages that follow each other on a link are delayed only once, as in a stream, and a sender waits only for the link.
This delays what goes through ``transfers.begin``, and the state of a newcomer as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.topology.groups import Replicas
from lightning_sdpipe.worker.elastic import state_transfer
from recipes.harness.processes import hook

ON_THE_WAY = 3
"""Latencies until a newcomer's state has come, besides size / rate: both sides connect, and the state is sent."""

AT_ONCE = 65536
"""Most bytes that are forwarded at once."""


class Late:
    """A message to be received, with the interface of a ``dist.Work``."""

    def __init__(self, work: Any, limit: timedelta, seconds: float) -> None:
        self._seconds = seconds
        self._came: Future[float] = Future()
        threading.Thread(target=self._receive, args=[work, limit], name="late message", daemon=True).start()

    def wait(self, limit: timedelta = timedelta(0)) -> None:
        """Wait for the message and then for its latency; ``limit`` was given for the message alone."""
        time.sleep(max(0.0, self._came.result() + self._seconds - time.monotonic()))

    def _receive(self, work: Any, limit: timedelta) -> None:
        try:
            work.wait(limit)
            self._came.set_result(time.monotonic())
        except RuntimeError as error:  # wait() raises it
            self._came.set_exception(error)


def arrive_late(seconds: float) -> None:
    """Make messages to this process arrive ``seconds`` later, until it ends."""
    begin = transfers.begin

    def begin_late(
        outgoing: Mapping[int, Tensor], into: Mapping[int, Tensor], replicas: Replicas, tag: int
    ) -> transfers.Transfers:
        under_way = begin(outgoing, into, replicas, tag)
        received = sum(1 for tensor in into.values() if tensor.numel())
        for place, message in enumerate(under_way.messages[:received]):
            late = cast(dist.Work, Late(message.work, replicas.limit, seconds))
            under_way.messages[place] = message._replace(work=late)
        return under_way

    transfers.begin = begin_late
    hook(state_transfer, "receive_state", lambda *_: time.sleep(ON_THE_WAY * seconds), after=True)


class DelayedLines:
    """A process that listens at ``host`` on each of ``ports`` until closed. It forwards the data and the end of each
    TCP connection to the same port on this machine, ``seconds`` later in each direction; connections are made at once.
    It is in the calling thread's network namespace.

    Raises:
        OSError: a port is not available.
    """

    def __init__(self, host: str, ports: Sequence[int], seconds: float) -> None:
        listening = [socket.create_server((host, port), backlog=1024) for port in ports]
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=lambda: asyncio.run(_serve(listening, seconds)), daemon=True)
        self._process.start()
        for each in listening:
            each.close()

    def close(self) -> None:
        """End the process, and with it all connections."""
        self._process.kill()
        self._process.join()


async def _serve(listening: Sequence[socket.socket], seconds: float) -> None:
    for each in listening:
        await asyncio.start_server(partial(_forward_both, each.getsockname()[1], seconds), sock=each)
    await asyncio.Event().wait()  # forever


async def _forward_both(port: int, seconds: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward a connection to ``port``."""
    try:
        there, back = await asyncio.open_connection("127.0.0.1", port)
    except OSError:  # no scheduler listens now
        writer.transport.abort()
        return
    await asyncio.gather(_forward(reader, back, seconds), _forward(there, writer, seconds))


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Forward one side's data until it closes."""
    clock = asyncio.get_running_loop().time
    said: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def hear() -> None:
        data = b"more"
        while data:
            try:
                data = await reader.read(AT_ONCE)
            except OSError:  # a process was killed before it read everything
                data = b""
            said.put_nowait((clock() + seconds, data))

    hearing = asyncio.ensure_future(hear())
    with contextlib.suppress(OSError):  # the other side is gone, which its own direction handles
        while True:
            due, data = await said.get()
            await asyncio.sleep(due - clock())
            if not data:
                break
            writer.write(data)
            await writer.drain()
    writer.close()
    await hearing
