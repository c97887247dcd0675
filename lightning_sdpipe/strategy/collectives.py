"""One worker of a run among the others: its parts of the run, and its collectives."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torchmetrics import Metric

from lightning_sdpipe import lightning_internals, meter
from lightning_sdpipe.errors import ConfigurationError, SchedulerError, WorkerFailedError
from lightning_sdpipe.lightning_results import metrics_of
from lightning_sdpipe.loop.batch_source import BatchSource
from lightning_sdpipe.loop.user_hooks import CollectiveGuard
from lightning_sdpipe.p2p import backend_for, waiting_for
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.sync.synchronizer import SyncStatistics
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.topology.tcp_store import open_store
from lightning_sdpipe.worker.assembly import Assembled
from lightning_sdpipe.worker.elastic.run import ElasticRun
from lightning_sdpipe.worker.launching.environment import keep_gloo_on_loopback
from lightning_sdpipe.worker.launching.launcher import give_up
from lightning_sdpipe.worker.options import Options
from lightning_sdpipe.worker.run import TrainingRun
from lightning_sdpipe.worker.scheduler_connection import RunConnection
from lightning_sdpipe.worker.training import Training

_T = TypeVar("_T")
_SETUP = (
    ". If it timed out, a rank was still in the setup hook of the module, of the data or of a callback: SDPipeStrategy("
    "timeout=...) bounds that. What one rank has to do alone (a download) belongs into prepare_data, which is not."
)


class FirstFailure:
    """A context for waits for other workers, whose errors say which worker failed first, and why.

    Args:
        explain: raises the cause of an error, if it is known.
    """

    def __init__(self, explain: Callable[[Exception], None]) -> None:
        self._explain = explain

    def __enter__(self) -> None:
        """Enter the wait."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and isinstance(error, WorkerFailedError | SchedulerError):
            self._explain(error)


class Collectives(DDPStrategy):
    """Lightning's collectives, for workers that need not be at the same point of training."""

    options: Options
    _assembled: Assembled | None = None
    _training: Training | None = None
    _source: BatchSource | None = None
    """Source of the batches that this worker trains; None in runs that do not fit."""
    _data_seed: int
    _undo: Sequence[Callable[[], object]] = ()
    brought_home: Mapping[str, Any] = {}
    """Results that the worker of rank 0 sent at the end, in a process that is no worker."""

    # ------------------------------------------------ how it gets among the others

    def setup_distributed(self) -> None:
        """Open the process group as Lightning does, through a store that no other machine of the network reaches."""
        reset_seed()
        self.set_world_ranks()
        backend = self._get_process_group_backend()
        lightning_internals.set_process_group_backend(self, backend)
        environment = self.cluster_environment
        assert environment is not None
        job = self.options.job
        one_machine = (self if job is None else job).num_nodes == 1
        if one_machine and job is None:  # pipelines of an elastic run may be on others
            self._undo = [*self._undo, keep_gloo_on_loopback(environment)]
        if dist.is_initialized():
            return
        place = environment.main_address, environment.main_port, self.global_rank, self.world_size
        lightning_internals.open_process_group(
            environment,
            backend,
            timeout=lightning_internals.collective_timeout(self),
            device_id=None,  # NCCL connects when it is first used
            store=PrefixStore("sdpipe", open_store(*place, one_machine, self.options.run_timeout)),
        )

    # ------------------------------------------------ what this worker has of a run

    @cached_property
    def _run(self) -> TrainingRun:
        """Run as this worker sees it: with a fixed number of workers, or elastic."""
        kind = TrainingRun if self.options.job is None else ElasticRun
        return kind(self.options, self, self._give_up)

    def _give_up(self) -> None:  # a method, since a lambda cannot be pickled for "spawn" and "forkserver"
        told_to_end = self.lightning_module is not None and self._trainer.received_sigterm
        give_up(self.launcher, 128 + signal.SIGTERM if told_to_end else 1)

    @property
    def module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self.module.trainer

    @property
    def mesh(self) -> Mesh:
        """Mesh of all workers' ranks. Where devices are placed, it is known once the ranks have gathered."""
        return self._run.mesh

    @property
    def groups(self) -> ProcessGroups:
        """Process groups of the run, and this worker's place in the mesh."""
        return self._run.groups

    @property
    def membership(self) -> RunConnection:
        """Connection of this worker to the scheduler; its ``client`` speaks for the training thread."""
        assert self._run.membership is not None, "setup_environment connects to the scheduler"
        return self._run.membership

    @property
    def training(self) -> Training:
        """Training of this worker in each turn of the loop."""
        assert self._training is not None, "setup makes it"
        return self._training

    @property
    def _batches(self) -> BatchSource:
        assert self._source is not None, "setup makes it for a fit"
        return self._source

    def _position(self) -> int | None:
        return None if self._source is None else self._source.position

    def _seed(self) -> int:
        return self._data_seed

    @property
    def statistics(self) -> SyncStatistics:
        """Statistics of this worker's synchronisation: group sizes and seconds spent. In a process that has started all
        workers (``start_method="fork"`` and the like), rank 0's."""
        found: SyncStatistics = self._cost("statistics")
        return found

    @property
    def seconds_waiting_for_pipeline(self) -> float:
        """Seconds that this worker stood still for the neighbouring stages of its pipeline, validation included. In a
        process that has started all workers, rank 0's, as with :attr:`statistics`."""
        return float(self._cost("seconds_waiting_for_pipeline"))

    def costs(self) -> Mapping[str, Any]:
        """Return this worker's values of the two; in a process that has started all workers, those that came home."""
        if self._training is None:
            return self.brought_home
        training = self.training
        waiting = training.meter.seconds(*meter.FOR_NEIGHBOURS) - training.waited_before
        return {"statistics": training.sync.statistics, "seconds_waiting_for_pipeline": waiting}

    def _cost(self, name: str) -> Any:
        costs = self.costs()
        if name not in costs:
            raise RuntimeError(f"strategy.{name} is known once the strategy has run: call trainer.fit before.")
        return costs[name]

    @property
    def _parts(self) -> Assembled:
        assert self._assembled is not None, "setup assembles the pipeline"
        return self._assembled

    @property
    def _worker(self) -> Worker:
        return Worker(*self.groups.mesh.locate(self.groups.rank))

    @cached_property
    def _guard(self) -> CollectiveGuard:
        return CollectiveGuard(self.options.num_stages, self._metrics)

    def _metrics(self) -> list[Metric]:
        return [*metrics_of(self.module, self._trainer.callbacks).values()]  # type: ignore[attr-defined]

    # ------------------------------------------------ what it does with others

    @property
    def _ends_alone(self) -> bool:
        """True while this process ends by an exception: no other may come to what it does with others, so it does that
        by itself."""
        module = self.lightning_module
        return (
            module is not None
            and module._trainer is not None
            and self._trainer.state.status == TrainerStatus.INTERRUPTED
        )

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce over the replicas of this stage. Within a step nothing is reduced: no pipeline waits for another
        there, and logged values are reduced at the end of the epoch."""
        if self._guard.in_step or (self._training is not None and self._training.updating) or self._ends_alone:
            return tensor
        group = group or self.groups.stage
        number = isinstance(tensor, Tensor) and tensor.ndim == 0 and tensor.is_floating_point()
        mine = tensor.double() if number else tensor  # replicas may have logged it in several types
        means = reduce_op in ("mean", "avg") and isinstance(tensor, Tensor)
        with self._together("reducing", group):
            total: Tensor = super().reduce(mine, group, "sum" if means else reduce_op)
        if means:  # Lightning lets gloo divide, which has no mean of integers where it is a part of a group
            mean = total / dist.get_world_size(group)
            whole = mean.dtype == total.dtype or total.dtype is torch.bool or torch.equal(mean, mean.round())
            # Lightning divides logged sums by the mean of the numbers of samples, which it cuts off
            total = total.copy_(mean) if whole else mean
        return total.to(tensor.dtype) if number else total

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._guard.check("reduce_boolean_decision")
        if self._ends_alone:
            return decision
        with self._together("a decision"):
            return self._run.vote(decision, all)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather one tensor from each pipeline, from the replicas of this stage.

        ``LightningModule.all_gather`` asks for all ranks by default; other stages may never reach the call.
        """
        group = self.groups.stage if group in (None, dist.group.WORLD) else group
        # torch.distributed.nn scatters by global rank
        if sync_grads and backend_for(self.root_device, group) == "gloo":
            raise ConfigurationError("all_gather(sync_grads=True) needs NCCL; on gloo, torch cannot do it in a group.")
        if self._guard.rehearsing:
            self._guard.communicates = True
            return torch.stack([tensor] * dist.get_world_size(group))
        with self._together("all_gather", group):
            return super().all_gather(tensor, group, sync_grads)

    def barrier(self, name: str | None = None) -> None:
        self._guard.check("barrier")
        if self._ends_alone:
            return
        asked = name == "post_setup"  # Lightning's name of that after the hooks
        with self._together("a barrier after the setup hooks" if asked else "a barrier", cause=_SETUP * asked):
            super().barrier(name)

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        self._guard.check("broadcast")
        if self._ends_alone:
            return obj
        with self._together("a broadcast"):
            return super().broadcast(obj, src)

    @contextmanager
    def _together(self, purpose: str, group: dist.ProcessGroup | None = None, cause: str = "") -> Iterator[None]:
        """Bring this worker together with others, all of them by default, for the block; they may be anywhere when it
        begins. Before others have been started there is no rank to wait for."""
        if self._training is not None:
            self._training.come_together()
        if not self._run.opened:
            yield
        else:
            with self._first_failure, waiting_for(group or self.groups.world, purpose, cause):
                yield

    @cached_property
    def _first_failure(self) -> FirstFailure:
        return FirstFailure(self._explain)

    def _explain(self, error: Exception) -> None:
        if self._run.membership is not None:  # else the run is over
            self._run.membership.explain(error, lambda: self._trainer.received_sigterm)
