"""Parameter servers as values of ``SDPipeStrategy(sync=...)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import lightning_sdpipe
from lightning_sdpipe.policies import PolicyConfig, check_integer
from recipes.baselines.admission import AdmissionRule

if TYPE_CHECKING:
    from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer


@dataclass(frozen=True)
class ParameterServer:
    """A parameter server: each pipeline pushes its updates and pulls the parameters with all updates.

    A push has the optimizer's changes in ``every`` updates, so any optimizer can be used: its state stays with the
    pipeline. The other values say which pushes count, with which weight, and when workers may go on:
    :class:`~recipes.baselines.admission.AdmissionRule`.

    ==========================  ===================================================================
    BSP                         the defaults
    SSP                         ``staleness=s``
    ASP                         ``staleness=None``
    HETE                        ``staleness=None, weights="inverse_staleness"``
    b backup workers            ``quorum=N - b``
    Eager-Reduce                ``quorum=⌈N/2⌉, late="carry"``
    ==========================  ===================================================================
    """

    quorum: int | None = None
    late: Literal["drop", "carry"] = "drop"
    staleness: int | None = 0
    weights: Literal["equal", "inverse_staleness"] = "equal"
    combine: Literal["mean", "sum"] = "mean"
    every: int = 1

    def __post_init__(self) -> None:
        check_integer("every", self.every, 1, "updates")
        assert self.rule  # making it checks its values

    @property
    def rule(self) -> AdmissionRule:
        """The rule of each stage's server."""
        return AdmissionRule(self.quorum, self.late, self.staleness, self.weights, self.combine)

    @property
    def policy(self) -> PolicyConfig:
        return lightning_sdpipe.NoSync()  # the parameter servers keep the clocks

    def build(self, replica: Replica) -> Synchronizer:
        from recipes.baselines.served_parameters import StaleSynchronous

        return StaleSynchronous(replica, self.rule, self.every)


@dataclass(frozen=True)
class HetPipe:
    """HetPipe (Park et al. 2020): each pipeline is a virtual worker of a parameter server.

    Every ``sync_every`` updates, its clock, it pushes the sum of its updates and pulls the parameters with those of
    all. No pipeline works more than ``staleness`` clocks ahead of another; M, the number of stages, if it is None.
    ``combine="mean"`` divides updates by the number of pipelines, so that a learning rate chosen for averaged gradients
    fits; ``"sum"`` follows HetPipe.
    """

    staleness: int | None = None
    sync_every: int = 10
    combine: Literal["sum", "mean"] = "sum"

    def __post_init__(self) -> None:
        check_integer("sync_every", self.sync_every, 1, "updates")
        self.server(1)

    def server(self, num_stages: int) -> ParameterServer:
        """Return the equivalent parameter server."""
        staleness = num_stages if self.staleness is None else self.staleness
        return ParameterServer(staleness=staleness, combine=self.combine, every=self.sync_every)

    @property
    def policy(self) -> PolicyConfig:
        return self.server(1).policy

    def build(self, replica: Replica) -> Synchronizer:
        return self.server(replica.num_stages).build(replica)
