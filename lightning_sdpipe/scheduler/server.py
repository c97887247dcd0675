"""The scheduler's socket: one ROUTER and a loop that receives, handles and sends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

import zmq

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.scheduler import messages as m
from lightning_sdpipe.scheduler.policy import GroupPolicy
from lightning_sdpipe.scheduler.service import Frame, SchedulerService


class Server:
    """Serves one policy. ``open`` binds, ``run`` serves until told to stop, ``close`` frees the port."""

    def __init__(
        self,
        policy: GroupPolicy,
        bind: str = "tcp://127.0.0.1:*",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = SchedulerService(policy)
        self.address = ""
        self._bind = bind
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None

    def open(self) -> str:
        """Bind and return the address that clients connect to."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 1000)  # an abort just sent must still leave
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.IPV6, 1 if "[" in self._bind else 0)
        try:
            socket.bind(self._bind)
        except zmq.ZMQError as error:
            socket.close(0)
            context.term()
            advice = (
                "another program listens there: end it or choose another port, or tcp://127.0.0.1:* for any"
                if error.errno == zmq.EADDRINUSE
                else "give an address of this machine, as in tcp://127.0.0.1:5555"
            )
            raise SchedulerError(
                f"the scheduler cannot listen at {self._bind} ({error.strerror}); {advice}"
            ) from error
        self._context, self._socket = context, socket
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return self.address

    def run(self, stop: Sequence[int]) -> None:
        """Serve until one of the file descriptors ``stop`` is readable (or at its end)."""
        socket, service = self._socket, self.service
        if socket is None:
            raise SchedulerError("the scheduler's server was run before it was opened")
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        for descriptor in stop:
            poller.register(descriptor, zmq.POLLIN)
        while True:
            deadline = service.deadline()
            patience = None if deadline is None else max(0.0, deadline - self._clock()) * 1000
            # Rounded up, since waking before the deadline would spin until it has come.
            events = dict(poller.poll(None if patience is None else int(patience) + 1))
            if any(descriptor in events for descriptor in stop):
                return
            if socket in events:
                self._receive_all(socket)
            self._send(socket, service.tick(self._clock()))

    def close(self) -> None:
        """Free the port; safe to call twice."""
        if self._socket is not None and self._context is not None:
            self._socket.close()
            self._context.term()
            self._socket = self._context = None

    def _receive_all(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(1000):  # then look at the clock again
            try:
                identity, *parts = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            frame = parts[0] if len(parts) == 1 else b""
            self._send(socket, self.service.handle(identity, frame, self._clock()))

    @staticmethod
    def _send(socket: zmq.Socket[bytes], frames: list[Frame]) -> None:
        for frame in frames:
            socket.send_multipart(frame)

    def __enter__(self) -> Server:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
