"""Messages between workers of this process arrive later than they do: the latency of links that only have a rate.

A message is sent at once, over whatever link there is, and its receiver has it so much later. So messages that follow
each other on one link are late once, as those of a stream are, and a sender waits for the link only. What is measured
so must be labelled *emulated*. Late is what goes through ``transfers.begin``, and the state of a newcomer as a whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.topology.groups import Replicas
from lightning_sdpipe.worker.elastic import state_transfer

ON_THE_WAY = 3
"""Latencies before a state has come, besides its size over the rate: both sides connect, and it is sent."""


class Late:
    """A message that is received; waits as a ``dist.Work`` does."""

    def __init__(self, work: Any, limit: timedelta, seconds: float) -> None:
        self._seconds = seconds
        self._came = threading.Event()
        self._at = 0.0
        self._failure: RuntimeError | None = None
        threading.Thread(target=self._receive, args=[work, limit], name="late message", daemon=True).start()

    def wait(self, limit: timedelta = timedelta(0)) -> None:
        """Wait until it has arrived late; ``limit`` has been that of the message itself."""
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
    begin, receive = transfers.begin, state_transfer.receive_state

    def begin_late(
        outgoing: Mapping[int, Tensor], into: Mapping[int, Tensor], replicas: Replicas, tag: int
    ) -> transfers.Transfers:
        under_way = begin(outgoing, into, replicas, tag)
        received = sum(1 for tensor in into.values() if tensor.numel())
        for place, message in enumerate(under_way.messages[:received]):
            late = cast(dist.Work, Late(message.work, replicas.limit, seconds))
            under_way.messages[place] = message._replace(work=late)
        return under_way

    def receive_late(*arguments: Any) -> dict[str, Any]:
        state = receive(*arguments)
        time.sleep(ON_THE_WAY * seconds)
        return state

    transfers.begin = begin_late
    setattr(state_transfer, "receive_state", cast(Callable[..., Any], receive_late))  # noqa: B010  # of another signature
