"""A run as one of its workers sees it: which worker it is, how it reaches the others, and what they do together.

Two kinds have the same methods and nothing else in common: :class:`~lightning_sdpipe.worker.fixed_run.FixedRun`, whose
workers are there from its beginning to its end, and :class:`~lightning_sdpipe.worker.elastic.run.ElasticRun`, whose
pipelines come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_sdpipe.checkpoints.files import Publisher
from lightning_sdpipe.checkpoints.worker import Checkpoints
from lightning_sdpipe.loop.batch_source import BatchSource
from lightning_sdpipe.loop.dealt import Dealing
from lightning_sdpipe.loop.loop import ClockChecks
from lightning_sdpipe.sync.rendezvous import Rendezvous
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer, TrainingState
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.worker.assembly import Assembled
from lightning_sdpipe.worker.options import Options
from lightning_sdpipe.worker.scheduler_connection import RunConnection
from lightning_sdpipe.worker.training import Training


class TrainingRun(Protocol):
    """One worker's, through all of its Trainer's runs on the same processes."""

    # ------------------------------------------------------------------ places

    @property
    def options(self) -> Options:
        """The strategy's, with what depends on the hosts, once those are known."""

    @property
    def mesh(self) -> Mesh:
        """Which rank is which worker. Where devices are placed, that is known once the ranks have met."""

    def check(self) -> None:
        """Before any other process exists.

        Raises:
            ConfigurationError: the number of workers does not fit, or options do not fit that or this kind of run.
        """

    def check_trainer(self, trainer: Trainer) -> None:
        """Raises ConfigurationError for what ``trainer`` is asked to do and such a run cannot."""

    def open(self) -> None:
        """Connects this worker with the others; each must call it when the world's process group is there."""

    @property
    def groups(self) -> ProcessGroups:
        """Of the run's processes, once it is open."""

    @property
    def opened(self) -> bool:
        """Are there others to meet yet?"""

    @property
    def membership(self) -> RunConnection | None:
        """This worker's line to the scheduler; None if no run is under way."""

    @property
    def leads(self) -> bool:
        """Is this the pipeline whose first rank logs and writes checkpoints?"""

    @property
    def publisher(self) -> Publisher | None:
        """What is asked before a checkpoint takes its place; None if only this process ever writes any."""

    @property
    def sampler(self) -> dict[str, int]:
        """What a distributed sampler of this pipeline is made with."""

    @property
    def evaluation_sampler(self) -> dict[str, int]:
        """As :attr:`sampler`, for validation and tests."""

    # ------------------------------------------------------------ what they do

    def replica(
        self, parts: Assembled, watch: bool, loss_scale: Callable[[], float], progress: TrainingState
    ) -> Replica:
        """This worker as one of the replicas of its stage."""

    def rendezvous(self, sync: Synchronizer) -> Rendezvous:
        """Where this worker is beside its replicas."""

    def dealt_batches(
        self, trainer: Trainer, training: Training, checkpoints: Checkpoints, checks: ClockChecks, dealing: Dealing
    ) -> BatchSource:
        """A source of batches that are dealt by speed; every worker must call it."""

    def set_out(self, trainer: Trainer, data_seed: int) -> int:
        """All is set up, and nothing restored yet. Returns the seed of the run's data: ``data_seed``, which is this
        worker's, unless it begins together with others."""

    def share(self, values: dict[str, float]) -> dict[str, float]:
        """What every worker gets of the metrics that each has; it returns what it is given where they stay. Every
        worker must call it."""

    def from_leader(self, numbers: list[float]) -> list[float]:
        """Gives all workers those of the first rank of the pipeline that leads. Every worker must call it."""

    def vote(self, decision: bool, all: bool) -> bool:
        """Are all for it, or (not ``all``) any? Every worker must call it."""

    def random_states(self) -> Mapping[str, Any]:
        """Of all workers, on rank 0; every one must call it."""

    def close(self) -> None:
        """The Trainer's run is over."""


def vote_in_the_world(decision: bool, all: bool, device: torch.device) -> bool:
    """That of all processes that have opened a process group together."""
    votes = torch.tensor(int(decision), device=device)
    dist.all_reduce(votes)
    return int(votes) == dist.get_world_size() if all else bool(votes)
