"""A run as one of its workers sees it: its place among the workers, its process groups, and their joint operations."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_sdpipe import p2p
from lightning_sdpipe.checkpoints import random_states
from lightning_sdpipe.checkpoints.files import Publisher
from lightning_sdpipe.checkpoints.worker import Checkpoints
from lightning_sdpipe.loop.dealt import DealtBatchSource, SourceInputs
from lightning_sdpipe.policies import registry
from lightning_sdpipe.sync.peers import Peers
from lightning_sdpipe.sync.synchronizer import Replica, TrainingState
from lightning_sdpipe.topology.groups import ProcessGroups, compare_meshes, roll_call
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.topology.placement_file import check_shape, mesh_of
from lightning_sdpipe.worker.assembly import Assembled
from lightning_sdpipe.worker.elastic.shared_evaluation import SharedEvaluations
from lightning_sdpipe.worker.launching.environment import TorchrunEnvironment, where_to_listen
from lightning_sdpipe.worker.options import Options
from lightning_sdpipe.worker.scheduler_connection import RunConnection, SchedulerConnection
from lightning_sdpipe.worker.training import Training

_EVERY_RANK = (
    ". Every rank must call fit, validate, test and predict as often as the others, so none of them may stand under "
    "`if trainer.is_global_zero:`; rank 0 alone may use what they return."
)


class TrainingRun:
    """The run of one worker, through all of its Trainer's runs on the same processes.

    Here all workers are present from beginning to end; in an :class:`~lightning_sdpipe.worker.elastic.run.ElasticRun`
    pipelines come and go.

    Args:
        options: those of the strategy; the attribute ``options`` has the values that depend on the hosts, once those
            are known.
        strategy: knows its processes and devices by the time that any method is called.
        give_up: ends this process's wait for a tensor that will never come; called in another thread.
    """

    membership: RunConnection | None = None
    """Connection of this worker to the scheduler; None if no run is under way."""
    peers: Peers | None = None
    """The present replicas of this worker's stage, while an elastic run is open; else None."""
    evaluations: SharedEvaluations | None = None
    """Divides the evaluations of a fit among the pipelines; None where each has a shard of its own."""

    def __init__(self, options: Options, strategy: DDPStrategy, give_up: Callable[[], None]) -> None:
        self.options = options
        self._strategy = strategy
        self._give_up = give_up
        self._placed: Mesh | None = None
        self._groups: ProcessGroups | None = None

    # ------------------------------------------------------------------ places

    @property
    def mesh(self) -> Mesh:
        """Mesh of the run. With a placement it is known once the ranks have gathered."""
        if self._placed is not None:
            return self._placed
        workers, options = self._strategy.num_nodes * self._strategy.num_processes, self.options
        started = self._unlike_machines
        if started:
            workers = self._strategy.world_size
        if options.placement is not None:
            check_shape(options.placement, options.num_stages, workers, options.depths)
        return options.mesh(workers, "torchrun has started") if started else options.mesh(workers)

    def check(self) -> None:
        """Check the options before any other process exists.

        Raises:
            ConfigurationError: the number of workers does not fit, or options do not fit that number or this kind of
                run.
        """
        mesh, placement = self.mesh, self.options.placement
        hosts = self._hosts([]) if placement is None else placement.hosts
        if placement is None and self._unlike_machines:  # as if each pipeline had a host of its own
            hosts = [str(pipeline) for pipeline in range(mesh.num_pipelines)]
        resolved = self.options.on_hosts(hosts)
        depths = () if mesh.alike else mesh.depths
        registry.build(resolved.method.policy, mesh.num_stages, mesh.num_pipelines, depths)
        if placement is None and not self._unlike_machines:  # else it is not known yet which pipeline is where
            self.options = resolved

    @property
    def _unlike_machines(self) -> bool:
        return bool(self.options.depths) and isinstance(self._strategy.cluster_environment, TorchrunEnvironment)

    def _hosts(self, devices: Sequence[str]) -> list[str]:
        """Return where the stages of each pipeline run: by the names of all ``devices``, or without them by the number
        of processes of a machine."""
        names = [device.rpartition(":")[0] for device in devices]
        of_a_machine = self._strategy.num_processes
        nodes = [[names[rank] if names else str(rank // of_a_machine) for rank in row] for row in self.mesh.ranks]
        if self.options.cuts:  # pipelines of unlike depths
            nodes = [[*dict.fromkeys(row)] for row in nodes]
        return [",".join(row) for row in nodes]

    def check_trainer(self, trainer: Trainer) -> None:
        """Raise ConfigurationError if ``trainer`` is asked for something that such a run cannot do."""

    def open(self) -> None:
        """Connect this worker with the others; each must call it once the world's process group exists."""
        strategy = self._strategy
        if self._groups is None:
            placement = self.options.placement
            if placement is not None or self._unlike_machines:
                devices = roll_call(strategy.local_rank, strategy.root_device)
                if placement is not None:
                    self._placed = mesh_of(placement, devices, alike=not self.options.cuts)
                self.options = self.options.on_hosts(self._hosts(devices))
            compare_meshes(self.mesh)
            self._groups = ProcessGroups.open(self.mesh, self.options.run_timeout)
        environment = strategy.cluster_environment
        assert environment is not None
        number = torch.tensor(1 + secrets.randbits(61) if dist.get_rank() == 0 else 0, device=strategy.root_device)
        with p2p.waiting_for(self._groups.world, "beginning a run", _EVERY_RANK):
            dist.all_reduce(number)  # rank 0's; a rank gets it once all have come, so none is still in the run before
        self.membership = SchedulerConnection(
            self.mesh,
            self.options.method.policy,
            int(number),
            self.options.standing_scheduler,
            lambda: where_to_listen(environment, strategy.num_nodes),
            self.options.run_timeout.total_seconds(),
            self._give_up,
            self.options.scheduler_log,
        )

    @property
    def groups(self) -> ProcessGroups:
        """Process groups of the run, once it is open."""
        assert self._groups is not None, "setup_environment opens the groups"
        return self._groups

    @property
    def opened(self) -> bool:
        """True once other workers can be reached."""
        return self._groups is not None

    @property
    def leads(self) -> bool:
        """True for the pipeline whose first rank logs and writes checkpoints."""
        return True  # no other pipeline has rank 0

    @property
    def publisher(self) -> Publisher | None:
        """Object that is asked before a checkpoint takes its place; None if only this process writes checkpoints."""
        return None

    @property
    def sampler(self) -> dict[str, int]:
        """Arguments of a distributed sampler of this pipeline."""
        _, pipeline = self.groups.mesh.locate(self.groups.rank)
        return {"num_replicas": self.mesh.num_pipelines, "rank": pipeline}

    @property
    def evaluation_sampler(self) -> dict[str, int]:
        """Arguments as :attr:`sampler`, for validation and tests."""
        return self.sampler

    # ------------------------------------------------------------ what they do

    def replica(
        self, parts: Assembled, watch: bool, loss_scale: Callable[[], float], progress: TrainingState
    ) -> Replica:
        """Return this worker as one of the replicas of its stage."""
        assert self.membership is not None
        return Replica(
            self.membership.client,
            self.groups,
            parts.freezing.buckets,
            parts.buffers,
            parts.freezing.trained,
            self.options.run_timeout,
            watch,
            self.options.exchange,
            loss_scale,
            progress,
            parts.freezing.name_of,
            sections=parts.own_sections,
            shared=parts.shared,
            peers=self.peers,
        )

    def dealt_batches(self, training: Training, checkpoints: Checkpoints, inputs: SourceInputs) -> DealtBatchSource:
        """Return a source of batches that are dealt by speed."""
        return DealtBatchSource(inputs)

    def set_out(self, trainer: Trainer, data_seed: int) -> int:
        """Begin the run once everything is set up, and before anything is restored. Return the seed of the run's data:
        this worker's ``data_seed``, unless it begins together with others."""
        return data_seed

    def share(self, values: dict[str, float]) -> dict[str, float]:
        """Return the metrics that every worker gets when each gives its ``values``: here rank 0's, which rank 0 gets
        unchanged. Every worker must call it."""
        shared = p2p.broadcast_value(values, 0, self.groups.world)
        return values if self.groups.rank == 0 else shared

    def from_leader(self, numbers: list[float]) -> list[float]:
        """Return the ``numbers`` of the first rank of the pipeline that leads. Every worker must call it."""
        agreed: list[float] = p2p.broadcast_value(numbers, 0, self.groups.world)
        return agreed

    def vote(self, decision: bool, all: bool) -> bool:
        """Return whether ``decision`` is true on all workers, or unless ``all`` on any. Every worker must call it."""
        votes = torch.tensor(int(decision), device=self._strategy.root_device)
        dist.all_reduce(votes)
        return int(votes) == dist.get_world_size() if all else bool(votes)

    def random_states(self) -> Mapping[str, Any]:
        """Return the random states of all workers, on rank 0; every worker must call it."""
        return random_states.gather(self.groups, self._strategy.root_device)

    def close(self) -> None:
        """Close the Trainer's run."""
        if self.membership is not None:
            self.membership.close()
            self.membership = None
