"""A run as one of its workers sees it: its place among the workers, its process groups, and their joint operations.

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
from lightning_sdpipe.worker.elastic.shared_evaluation import SharedEvaluations
from lightning_sdpipe.worker.options import Options
from lightning_sdpipe.worker.scheduler_connection import RunConnection
from lightning_sdpipe.worker.training import Training


class TrainingRun(Protocol):
    """The run of one worker, through all of its Trainer's runs on the same processes."""

    # ------------------------------------------------------------------ places

    @property
    def options(self) -> Options:
        """Options of the strategy, with the values that depend on the hosts, once those are known."""

    @property
    def mesh(self) -> Mesh:
        """Mesh of the run. Where devices are placed, it is known once the ranks have gathered."""

    def check(self) -> None:
        """Check the options before any other process exists.

        Raises:
            ConfigurationError: the number of workers does not fit, or options do not fit that number or this kind of
                run.
        """

    def check_trainer(self, trainer: Trainer) -> None:
        """Raise ConfigurationError for what ``trainer`` is asked to do and such a run cannot."""

    def open(self) -> None:
        """Connect this worker with the others; each must call it when the world's process group exists."""

    @property
    def groups(self) -> ProcessGroups:
        """Process groups of the run, once it is open."""

    @property
    def opened(self) -> bool:
        """True if other workers can be reached yet."""

    @property
    def membership(self) -> RunConnection | None:
        """Connection of this worker to the scheduler; None if no run is under way."""

    @property
    def leads(self) -> bool:
        """True for the pipeline whose first rank logs and writes checkpoints."""

    @property
    def publisher(self) -> Publisher | None:
        """Asked before a checkpoint takes its place; None if only this process ever writes any."""

    @property
    def sampler(self) -> dict[str, int]:
        """Arguments of a distributed sampler of this pipeline."""

    @property
    def evaluation_sampler(self) -> dict[str, int]:
        """Arguments as :attr:`sampler`, for validation and tests."""

    @property
    def evaluations(self) -> SharedEvaluations | None:
        """Divides the evaluations of a fit among the pipelines; None where each has a shard of its own."""

    # ------------------------------------------------------------ what they do

    def replica(
        self, parts: Assembled, watch: bool, loss_scale: Callable[[], float], progress: TrainingState
    ) -> Replica:
        """Return this worker as one of the replicas of its stage."""

    def rendezvous(self, sync: Synchronizer) -> Rendezvous:
        """Return this worker's synchronisation state."""

    def dealt_batches(
        self, trainer: Trainer, training: Training, checkpoints: Checkpoints, checks: ClockChecks, dealing: Dealing
    ) -> BatchSource:
        """Return a source of batches that are dealt by speed; every worker must call it."""

    def set_out(self, trainer: Trainer, data_seed: int) -> int:
        """Set out when all is set up, and nothing restored yet. Return the seed of the run's data: ``data_seed``, which
        is this worker's, unless it begins together with others."""

    def share(self, values: dict[str, float]) -> dict[str, float]:
        """Return the metrics that every worker gets from ``values``, those that each has; unchanged where they stay
        local. Every worker must call it."""

    def from_leader(self, numbers: list[float]) -> list[float]:
        """Return the ``numbers`` of the first rank of the pipeline that leads. Every worker must call it."""

    def vote(self, decision: bool, all: bool) -> bool:
        """Return whether all are for it, or (not ``all``) any. Every worker must call it."""

    def random_states(self) -> Mapping[str, Any]:
        """Return the random states of all workers, on rank 0; every worker must call it."""

    def close(self) -> None:
        """Close the Trainer's run."""


def vote_in_the_world(decision: bool, all: bool, device: torch.device) -> bool:
    """Return the vote of all processes that have opened a process group together."""
    votes = torch.tensor(int(decision), device=device)
    dist.all_reduce(votes)
    return int(votes) == dist.get_world_size() if all else bool(votes)
