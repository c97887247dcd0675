"""Barriers of whole pipelines, where these are cut unlike and their stages are no replicas.

All workers of a pipeline meet together: stage 0 asks the scheduler, with what every stage has to say, and the others
take over the answer. So all stages know the same pipelines to be there, and each averages its sections among these.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from lightning_sdpipe import p2p
from lightning_sdpipe.membership.members import Met
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.client.membership_client import MembershipClient
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.worker.elastic.barriers import Barriers, pack, unpack_max
from lightning_sdpipe.worker.elastic.epoch_process_groups import EpochGroups

_Decision = TypeVar("_Decision")


def of_all_stages(groups: ProcessGroups, mine: Any) -> list[Any]:
    """Return what each stage of this worker's pipeline gives, by stage. Every stage must call it, with JSON values."""
    _, pipeline = groups.mesh.locate(groups.rank)
    ranks = groups.mesh.pipeline_ranks(pipeline)
    return [p2p.broadcast_value(mine, rank, groups.everybody) for rank in ranks]


class PipelineBarriers(Barriers):
    """The barriers of one worker; every stage of its pipeline must call each method at the same point.

    Args:
        worker: this worker.
        line: its client of the scheduler.
        epochs: the process groups of its run.
        point: see :class:`~lightning_sdpipe.worker.elastic.barriers.Barriers`, as for ``met``.
        met: called after each barrier.
        groups: this worker's process groups.
        sections: numbers of the sections that it exchanges, in order.
    """

    def __init__(
        self,
        worker: Worker,
        line: MembershipClient,
        epochs: EpochGroups,
        point: Callable[[], str],
        met: Callable[[], None],
        groups: ProcessGroups,
        sections: Sequence[int],
    ) -> None:
        super().__init__(Worker(0, worker.pipeline), line, epochs, point, met)
        self._speaks = worker.stage == 0
        self._groups, self._sections = groups, sections

    def meet(self, says: bytes = b"") -> Met:
        """See the base class; the pipeline says what all of its stages do."""
        return super().meet(msgspec.msgpack.encode(self._of_stages(says)))

    def said(self, met: Met) -> dict[int, list[bytes]]:
        """Return what each pipeline has said that came to ``met``, by stage."""
        return {
            pipeline: msgspec.msgpack.decode(value, type=list[bytes])
            for pipeline, value in zip(met.pipelines, met.values, strict=True)
        }

    def pack(self, integers: Sequence[Sequence[Tensor]]) -> bytes:
        """See the base class; the integers of a section are said by the stage that exchanges it."""
        return msgspec.msgpack.encode(dict(zip(self._sections, map(pack, integers), strict=True)))

    def unpack_max(self, integers: Sequence[Sequence[Tensor]], each: Sequence[Sequence[bytes]]) -> None:
        """See the base class."""
        of_pipelines: list[dict[int, bytes]] = [{} for _ in each]
        for sections, values in zip(of_pipelines, each, strict=True):
            for value in values:
                sections |= msgspec.msgpack.decode(value, type=dict[int, bytes])
        for number, own in zip(self._sections, integers, strict=True):
            unpack_max(own, [sections[number] for sections in of_pipelines])

    def agree(self, groups: ProcessGroups, mine: Any, decide: Callable[[Mapping[int, Any]], _Decision]) -> _Decision:
        """Return what ``decide`` makes of what the first ranks of the pipelines say, which run their last stages."""
        said = self.said(self.meet(json.dumps(mine).encode()))
        return decide({pipeline: json.loads(values[-1]) for pipeline, values in said.items()})

    def pass_by(self) -> None:
        """Tell the scheduler that this worker is past what the last stages gather, which may then be stuck."""
        if self._last is not None:
            self._epochs.use(self._group(self._last, dict.fromkeys(self._last.pipelines, 1.0)))
            self._epochs.use(None)

    def _ask(self, key: str, says: bytes) -> Met:
        said = "" if not self._speaks else msgspec.json.encode(super()._ask(key, says)).decode()
        pipeline = self._worker.pipeline
        heard = p2p.broadcast_value(said, self._groups.mesh.rank(0, pipeline), self._groups.everybody)
        return msgspec.json.decode(heard, type=Met)

    def _of_stages(self, says: bytes) -> list[bytes]:
        return [b64decode(each) for each in of_all_stages(self._groups, b64encode(says).decode())]
