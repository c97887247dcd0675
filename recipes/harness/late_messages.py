"""Emulated latency, which must be labelled so: of messages between workers, and of lines to a scheduler far away.

Between workers a message is sent at once, over whatever link there is, and its receiver has it so much later. So
messages that follow each other on one link are late once, as those of a stream are, and a sender waits for the link
only. Late is what goes through ``transfers.begin``, and the state of a newcomer as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import threading
import time
from collections.abc import Mapping, Sequence
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
"""Latencies before a state has come, besides its size over the rate: both sides connect, and it is sent."""

AT_ONCE = 65536
"""Bytes."""


class Late:
    """A message to be received, with the interface of a ``dist.Work``."""

    def __init__(self, work: Any, limit: timedelta, seconds: float) -> None:
        self._seconds = seconds
        self._came = threading.Event()
        self._at = 0.0
        self._failure: RuntimeError | None = None
        threading.Thread(target=self._receive, args=[work, limit], name="late message", daemon=True).start()

    def wait(self, limit: timedelta = timedelta(0)) -> None:
        """Wait for the message and for its latency; ``limit`` is that of the message alone."""
        self._came.wait()
        if self._failure is not None:
            raise RuntimeError(str(self._failure)) from self._failure
        time.sleep(max(0.0, self._at + self._seconds - time.monotonic()))

    def _receive(self, work: Any, limit: timedelta) -> None:
        try:
            work.wait(limit)
        except RuntimeError as error:  # raised where it is waited for
            self._failure = error
        self._at = time.monotonic()
        self._came.set()


def arrive_late(seconds: float) -> None:
    """Make messages to this process arrive so much later, until it ends."""
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
    """A process that listens at ``host`` on each of ``ports`` until it is closed, and forwards what TCP connections
    say, and that they close, to the same port of this machine, ``seconds`` later in each direction. Connections are
    made at once. It is in the namespace of the network that the calling thread is in.

    Raises:
        OSError: one of the ports cannot be had.
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
    await asyncio.Event().wait()  # for ever


async def _forward_both(port: int, seconds: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward a connection to ``port``."""
    try:
        there, back = await asyncio.open_connection("127.0.0.1", port)
    except OSError:  # no scheduler listens at the moment
        writer.transport.abort()
        return
    await asyncio.gather(_forward(reader, back, seconds), _forward(there, writer, seconds))


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Forward what one side says until it closes."""
    clock = asyncio.get_running_loop().time
    said: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def hear() -> None:
        data = b"more"
        while data:
            try:
                data = await reader.read(AT_ONCE)
            except OSError:  # of a process that was killed with something unread
                data = b""
            said.put_nowait((clock() + seconds, data))

    hearing = asyncio.ensure_future(hear())
    with contextlib.suppress(OSError):  # the other side has gone, as its own direction says
        while True:
            due, data = await said.get()
            await asyncio.sleep(due - clock())
            if not data:
                break
            writer.write(data)
            await writer.drain()
    writer.close()
    await hearing
