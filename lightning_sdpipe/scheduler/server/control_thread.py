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

from lightning_sdpipe.scheduler.server.authentication import KeyCheck


class StopMessage:
    """Where the frame that means "stop" comes from: a name that no client can guess, inside the process."""

    def __init__(self) -> None:
        self.identity = b"stop-" + secrets.token_bytes(16)
        self.endpoint = "inproc://stop"


class ControlThread:
    """Lives while the server's loop runs."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        stop_message: StopMessage,
        stop: Sequence[int],
        key_check: KeyCheck | None,
    ) -> None:
        self._context = context
        self._stop_message = stop_message
        self._stop = stop
        self._key_check = key_check
        self._dismissed, self._dismiss = os.pipe()
        self._thread = threading.Thread(target=self._run, name="scheduler watcher", daemon=True)

    def __enter__(self) -> ControlThread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._dismiss)
        self._thread.join()
        os.close(self._dismissed)

    def _run(self) -> None:
        key_check = self._key_check
        poller = zmq.Poller()
        for descriptor in (*self._stop, self._dismissed):
            poller.register(descriptor, zmq.POLLIN)
        if key_check is not None:
            poller.register(key_check.questions, zmq.POLLIN)
            poller.register(key_check.news, zmq.POLLIN)
        while True:
            events = dict(poller.poll())
            if self._dismissed in events:
                return
            if any(descriptor in events for descriptor in self._stop):
                self._tell()
                return
            if key_check is not None and key_check.questions in events:
                key_check.answer()
            if key_check is not None and key_check.news in events:
                key_check.hear()

    def _tell(self) -> None:
        with self._context.socket(zmq.DEALER) as notifier:
            notifier.setsockopt(zmq.ROUTING_ID, self._stop_message.identity)
            notifier.setsockopt(zmq.LINGER, 1000)
            notifier.connect(self._stop_message.endpoint)
            notifier.send(b"")
