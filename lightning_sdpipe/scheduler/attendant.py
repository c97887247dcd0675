"""A thread beside the server's loop that watches what is not a worker's message.

That is the sign to stop, which it passes to the loop as a frame, and the questions of CURVE.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from types import TracebackType

import zmq

from lightning_sdpipe.scheduler.authentication import Gatekeeper


class Bell:
    """Where the frame that means "stop" comes from: a name that no client can guess, inside the process."""

    def __init__(self) -> None:
        self.identity = b"stop-" + secrets.token_bytes(16)
        self.endpoint = "inproc://stop"


class Attendant:
    """Lives while the server's loop runs."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        bell: Bell,
        stop: Sequence[int],
        gatekeeper: Gatekeeper | None,
    ) -> None:
        self._context = context
        self._bell = bell
        self._stop = stop
        self._gatekeeper = gatekeeper
        self._dismissed, self._dismiss = os.pipe()
        self._thread = threading.Thread(target=self._run, name="scheduler attendant", daemon=True)

    def __enter__(self) -> Attendant:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._dismiss)
        self._thread.join()
        os.close(self._dismissed)

    def _run(self) -> None:
        gatekeeper = self._gatekeeper
        poller = zmq.Poller()
        for descriptor in (*self._stop, self._dismissed):
            poller.register(descriptor, zmq.POLLIN)
        if gatekeeper is not None:
            poller.register(gatekeeper.questions, zmq.POLLIN)
            poller.register(gatekeeper.news, zmq.POLLIN)
        while True:
            events = dict(poller.poll())
            if self._dismissed in events:
                return
            if any(descriptor in events for descriptor in self._stop):
                self._ring()
                return
            if gatekeeper is not None and gatekeeper.questions in events:
                gatekeeper.answer()
            if gatekeeper is not None and gatekeeper.news in events:
                gatekeeper.hear()

    def _ring(self) -> None:
        with self._context.socket(zmq.DEALER) as bell:
            bell.setsockopt(zmq.ROUTING_ID, self._bell.identity)
            bell.setsockopt(zmq.LINGER, 1000)
            bell.connect(self._bell.endpoint)
            bell.send(b"")
