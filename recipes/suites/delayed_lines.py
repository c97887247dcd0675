"""Lines to a scheduler that is far away: a process forwards what TCP connections say, and that they close, later.

What is said over them may be encrypted; nothing of it is read. Connections are made at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
from collections.abc import Sequence

AT_ONCE = 65536
"""Bytes."""


class DelayedLines:
    """Listens at ``host`` on each of ``ports`` until it is closed, and forwards to the same port of this machine,
    ``seconds`` later in each direction. It is in the namespace of the network that the calling thread is in.

    Raises:
        OSError: one of the ports cannot be had.
    """

    def __init__(self, host: str, ports: Sequence[int], seconds: float) -> None:
        listening = [socket.create_server((host, port), backlog=1024) for port in ports]
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_run, args=(listening, seconds), daemon=True)
        self._process.start()
        for each in listening:
            each.close()

    def close(self) -> None:
        """End the process, and with it all connections."""
        self._process.kill()
        self._process.join()


def _run(listening: Sequence[socket.socket], seconds: float) -> None:
    asyncio.run(_serve(listening, seconds))


async def _serve(listening: Sequence[socket.socket], seconds: float) -> None:
    for each in listening:
        await asyncio.start_server(_Forwarding(each.getsockname()[1], seconds), sock=each)
    await asyncio.Event().wait()  # for ever


class _Forwarding:
    """A function that forwards a connection to ``port``."""

    def __init__(self, port: int, seconds: float) -> None:
        self._port, self._seconds = port, seconds

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:  # no scheduler listens at the moment
            writer.transport.abort()
            return
        await asyncio.gather(self._forward(reader, back), self._forward(there, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward what one side says until it closes."""
        clock = asyncio.get_running_loop().time
        said: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        hearing = asyncio.ensure_future(self._hear(reader, said))
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

    async def _hear(self, reader: asyncio.StreamReader, said: asyncio.Queue[tuple[float, bytes]]) -> None:
        clock, data = asyncio.get_running_loop().time, b"more"
        while data:
            try:
                data = await reader.read(AT_ONCE)
            except OSError:  # of a process that was killed with something unread
                data = b""
            said.put_nowait((clock() + self._seconds, data))
