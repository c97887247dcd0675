"""The synchronisation methods that a user chooses from: values, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.scheduler.specification import (
    ADPSGDSpec,
    LocalSGDSpec,
    NoSyncSpec,
    PolicySpec,
    SemiDecentralizedSpec,
)
from lightning_sdpipe.sync.asynchronous_pairs import AsynchronousPairs
from lightning_sdpipe.sync.gradient_averaging import GradientAveraging
from lightning_sdpipe.sync.model_averaging import ModelAveraging
from lightning_sdpipe.sync.stale_synchronous import StaleSynchronous
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer


class SemiDecentralized(SemiDecentralizedSpec, frozen=True):
    """SDPipe: models are averaged after every step, in groups of those that are ready within a window.

    ``window`` is in seconds, ``"auto"``, or inf, which makes one group of everybody. ``connectivity`` is P in rounds,
    None to enforce nothing. Groups below ``min_group`` widen the window of who opened them; larger ones than
    ``max_group`` are split; None is 4 beyond eight pipelines, else no limit.
    """

    @property
    def policy(self) -> PolicySpec:
        return self

    def build(self, replica: Replica) -> Synchronizer:
        return ModelAveraging(replica)


class LocalSGD(LocalSGDSpec, frozen=True):
    """Models are averaged with everybody in each update that ``every`` divides, and nobody waits in the others."""

    @property
    def policy(self) -> PolicySpec:
        return self

    def build(self, replica: Replica) -> Synchronizer:
        return ModelAveraging(replica, self.every)


class ADPSGD(ADPSGDSpec, frozen=True):
    """AD-PSGD: models are averaged in pairs after every step.

    As SDPipe §5.1 compares with it, pairs are drawn from ``seed``, afresh for every iteration, and the two wait for
    each other. ``asynchronous`` is the algorithm of Lian et al. 2018: a worker averages at once with a random
    neighbour, which goes on computing.
    """

    @property
    def policy(self) -> PolicySpec:
        return self

    def build(self, replica: Replica) -> Synchronizer:
        return AsynchronousPairs(replica) if self.asynchronous else ModelAveraging(replica)


@dataclass(frozen=True)
class AllReduce:
    """Gradients are averaged over all replicas before every step, as DistributedDataParallel does it.

    They travel in flat buckets of about ``bucket_mib`` MiB, each as soon as the backward has filled it.
    """

    bucket_mib: float = 25.0

    def __post_init__(self) -> None:
        if not self.bucket_mib > 0:
            raise ConfigurationError(f"bucket_mib={self.bucket_mib} is not allowed; give MiB above 0.")

    @property
    def policy(self) -> PolicySpec:
        return NoSyncSpec()  # everybody meets everybody: there is nothing to decide

    def build(self, replica: Replica) -> Synchronizer:
        return GradientAveraging(replica, int(self.bucket_mib * 2**20))


@dataclass(frozen=True)
class NoSync:
    """Pipelines train alone until the next pause: the bound on throughput that no method can beat."""

    @property
    def policy(self) -> PolicySpec:
        return NoSyncSpec()

    def build(self, replica: Replica) -> Synchronizer:
        return Synchronizer(replica)


@dataclass(frozen=True)
class HetPipe:
    """HetPipe (Park et al. 2020): each pipeline is a virtual worker of a parameter server.

    Every ``sync_every`` updates, its clock, it pushes the sum of its updates and pulls the parameters with everybody's.
    No pipeline works more than ``staleness`` clocks ahead of another; M, the number of stages, if it is None.
    ``combine="mean"`` divides updates by the number of pipelines, so that a learning rate chosen for averaged gradients
    fits; ``"sum"`` is what HetPipe does.
    """

    staleness: int | None = None
    sync_every: int = 10
    combine: Literal["sum", "mean"] = "sum"

    def __post_init__(self) -> None:
        if self.staleness is not None and self.staleness < 0:
            raise ConfigurationError(f"staleness={self.staleness} is not allowed; give clocks from 0, or None for M.")
        if self.sync_every < 1:
            raise ConfigurationError(f"sync_every={self.sync_every} is not allowed; give updates from 1.")
        if self.combine not in ("sum", "mean"):
            raise ConfigurationError(f'combine={self.combine!r} is not allowed; give "sum" or "mean".')

    @property
    def policy(self) -> PolicySpec:
        return NoSyncSpec()  # the parameter servers keep the clocks

    def build(self, replica: Replica) -> Synchronizer:
        staleness = replica.groups.mesh.num_stages if self.staleness is None else self.staleness
        return StaleSynchronous(replica, staleness, self.sync_every, self.combine == "mean")
