"""How a pipeline comes into an elastic run: with the state of one that trains, or with those that begin together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.scheduler.elastic_client import Receive, Start

State = dict[str, Any]


class Door(Protocol):
    """The scheduler; see :class:`~lightning_sdpipe.scheduler.elastic_client.ElasticClient`."""

    def enrol(self, fingerprint: Mapping[str, str]) -> Start | Receive:
        """Wants to take part."""

    def received(self, transfer: str) -> Start | Receive:
        """The state is here."""

    def missed(self, transfer: str, reason: str) -> Start | Receive:
        """It did not come."""


def join(door: Door, mine: Mapping[str, str], take: Callable[[Receive], State]) -> tuple[Start, State | None]:
    """Waits until training begins, and takes the state that it begins with.

    Returns:
        The start, and the state; None where this pipeline begins anew, although it may have received some of a donor
        that was lost before all of its stages had theirs.
    """
    state: State | None = None
    answer = door.enrol(mine)
    while isinstance(answer, Receive):
        try:
            state = take(answer)
        except WorkerFailedError as error:
            answer = door.missed(answer.transfer, str(error))
        else:
            answer = door.received(answer.transfer)
    return answer, None if answer.fresh else state
