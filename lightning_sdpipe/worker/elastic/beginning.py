"""How a pipeline comes into an elastic run: with the state of one that trains, or with those that begin together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.scheduler.client.elastic_client import Receive, Start
from lightning_sdpipe.worker.elastic.meetings import Meetings, apart, take_over, told

State = dict[str, Any]
Gather = Callable[[Any], list[Any]]
"""What each stage of this worker's pipeline gives, by stage; every stage must call it, with what JSON can say."""
_END = b"\0"  # of what a worker says at the meeting; its integers follow
_DONE, _NOT = b"\x01", b"\x00"


class Door(Protocol):
    """The scheduler; see :class:`~lightning_sdpipe.scheduler.client.elastic_client.ElasticClient`."""

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


def begin_together(meetings: Meetings, tensors: Sequence[Tensor], says: bytes, gather: Gather) -> bytes:
    """Makes ``tensors`` on all of the first pipelines those of one of them, the same one in every stage.

    Each stage meets by itself. When a pipeline is lost meanwhile one stage may have met with it and another without, or
    one may have its tensors and another not. So the stages of a pipeline tell each other how their meetings went, which
    is the same in all pipelines: the source is the first one that came in every stage, and if not everybody who is left
    has its tensors in every stage, all begin again with what they had at first.

    Args:
        meetings: of this worker's stage, at a point of their own.
        tensors: parameters and buffers, changed when the source is agreed on.
        says: what else the source is to tell, without a zero byte.
        gather: among the stages of this worker's pipeline.

    Returns:
        What the source says.

    Raises:
        ConfigurationError: integers are too many to be told.
        WorkerFailedError: another stage of this worker's pipeline is lost.
    """
    floating, integers = apart(tensors)
    while True:
        met = meetings.meet(says + _END + told(integers))
        members = sorted(set.intersection(*map(set, gather(met.pipelines))))
        source = members[0]
        copies = [tensor.detach().clone() for tensor in floating]
        copied = meetings.weigh(copies, met, {pipeline: float(pipeline == source) for pipeline in members})
        done = meetings.meet(_DONE if copied else _NOT)
        if all(gather(all(value == _DONE for value in done.values))):
            break
    said, _, of_source = met.values[met.pipelines.index(source)].partition(_END)
    for tensor, copy in zip(floating, copies, strict=True):
        tensor.copy_(copy)
    take_over(integers, [of_source])
    return said
