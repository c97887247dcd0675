"""A worker of an elastic job as one of the replicas of its stage, whose number changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.moving import Mover
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.sync.synchronizer import Replica
from lightning_sdpipe.worker.elastic.meetings import Meetings


@dataclass(frozen=True)
class ElasticReplica(Replica):
    """See :class:`~lightning_sdpipe.sync.synchronizer.Replica`."""

    meetings: Meetings = field(kw_only=True)
    means: Mover = field(kw_only=True)  # among the members of a group, some of whom may be lost
    present: Callable[[], int] = field(kw_only=True)  # pipelines

    @property
    def count(self) -> int:
        return self.present()

    def mover(self) -> Mover:
        return self.means

    def average(self, tensors: Sequence[Tensor]) -> None:
        self.meetings.average(tensors)

    def everybody(self, weights: Sequence[float] | None = None, sequence: int = 0) -> Group:
        raise ConfigurationError(
            "This method of synchronisation asks for all replicas of a stage at once, and in an elastic job they come "
            "and go. Use SemiDecentralized(), PartialReduce(), LocalSGD(every=...), ADPSGD() or NoSync()."
        )
