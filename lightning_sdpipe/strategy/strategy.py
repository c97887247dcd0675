"""The Lightning strategy: its options, and its hooks, each a few calls into neighbouring packages."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_sdpipe import lightning_internals, meter
from lightning_sdpipe.checkpoints.agreement import agree_on
from lightning_sdpipe.checkpoints.distributed import directory_of, is_distributed, read_part, replacing
from lightning_sdpipe.checkpoints.files import whole_files, with_whole_files
from lightning_sdpipe.checkpoints.whole import load_module_state
from lightning_sdpipe.checkpoints.whole_module import is_whole
from lightning_sdpipe.data.loader import PipelineLoader
from lightning_sdpipe.data.same_samples import unlike_samples
from lightning_sdpipe.errors import ONLY_LIGHTNING, ConfigurationError, NotWrittenError
from lightning_sdpipe.exchange.buckets import tensors_of
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.heterogeneity.injector import DelayInjector, Heterogeneity
from lightning_sdpipe.lightning_internals import WrappingCheckpointIO
from lightning_sdpipe.lightning_results import metrics_of
from lightning_sdpipe.loop.batch_source import BatchSource, split_of
from lightning_sdpipe.loop.finetuning import restore_groups
from lightning_sdpipe.loop.loop import change_back
from lightning_sdpipe.loop.optimizers import agree_on_groups, corrected, follow, refuse_unfit, refuse_unfit_momentum
from lightning_sdpipe.loop.planning import Planning, memory_of, plan_on_rank_zero
from lightning_sdpipe.loop.predictions import collect, deal_batches
from lightning_sdpipe.loop.refusals import (
    refuse_several_optimizers,
    refuse_small_batches,
    refuse_uninitialised,
    refuse_unsupported,
)
from lightning_sdpipe.loop.weight_averaging import averaging_of
from lightning_sdpipe.p2p import backend_for, broadcast_value, waiting_for
from lightning_sdpipe.partition import plan
from lightning_sdpipe.partition.materialise import Initialisation
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.partition.pipeline_cut import Partition, PipelineCut
from lightning_sdpipe.partition.same_memory import same_memory
from lightning_sdpipe.pipeline.data import shared_seed
from lightning_sdpipe.pipeline.stage_runner import CollectiveGuard
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.seeing.page import last_line
from lightning_sdpipe.strategy.optimizer_states import added_to, taken_from
from lightning_sdpipe.strategy.setup import Origin, Setup
from lightning_sdpipe.sync.synchronizer import SyncMethod, SyncStatistics
from lightning_sdpipe.topology.groups import ProcessGroups, backends, prepare_world
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.topology.tcp_store import open_store
from lightning_sdpipe.worker.assembly import Assembled, assemble
from lightning_sdpipe.worker.elastic.run import ElasticRun
from lightning_sdpipe.worker.elastic.shared_evaluation import Evaluation
from lightning_sdpipe.worker.launching import elastic_job
from lightning_sdpipe.worker.launching.environment import (
    ElasticEnvironment,
    environment_for,
    keep_gloo_on_loopback,
    naming_the_port,
)
from lightning_sdpipe.worker.launching.launcher import end_after_failure, give_up, launcher_for
from lightning_sdpipe.worker.options import Schedule, check_arguments, resolve
from lightning_sdpipe.worker.run import TrainingRun
from lightning_sdpipe.worker.scheduler_connection import RunConnection
from lightning_sdpipe.worker.training import FirstFailure, Training

_OF_A_RUN = frozenset({"_run", "_set_up", "_origin", "_guard", "_first_failure", "_undo", "_plans", "_initialisation"})
_T = TypeVar("_T")
_SETUP = (
    ". If it timed out, a rank was still in the setup hook of the module, of the data or of a callback: SDPipeStrategy("
    "timeout=...) bounds that. Work of one rank alone (a download) belongs in prepare_data, which is not bounded."
)
log = logging.getLogger(__name__)


class SDPipeStrategy(DDPStrategy):
    """Pipeline and data parallel training on unequal workers (SDPipe, VLDB 2023).

    ``devices × num_nodes`` workers form N pipelines of ``num_stages`` stages. Each stage runs its part of your own
    ``training_step``, and the N replicas of a stage average their models or gradients as ``sync`` says. The batch size
    is that of one pipeline. ``options`` holds the resolved arguments.

    Args:
        num_stages: number M of stages of a pipeline, which must divide the number of workers; or a list with the number
            of each pipeline, such as ``[1, 2, 2]`` for five workers. Default: ``1``.
        sync: the synchronisation method: an object such as ``AllReduce()``, or the name of one with its defaults, such
            as ``"all_reduce"``. Or a policy of your own, or its import path, such as
            ``"my_package.policies:RoundRobin"``. Default: ``None``, which is ``SemiDecentralized()``.
        schedule: the order of forwards and backwards. ``"1f1b"``, ``"gpipe"``, ``"interleaved_1f1b"`` and
            ``"zero_bubble"`` finish a mini-batch before the optimizer steps; ``"pipedream"`` overlaps mini-batches,
            with gradients that are up to M − 1 updates late. Default: ``"1f1b"``.
        stages_per_worker: how many stages a worker runs with ``"interleaved_1f1b"`` and ``"zero_bubble"``; they are
            ``num_stages`` apart. Refused with other schedules. Default: ``2``.
        num_micro_batches: how many parts of a mini-batch are in the pipeline at the same time. Refused with
            ``"pipedream"``, which does not split mini-batches. Default: ``None``, which is ``num_stages``, or the
            largest number of its list.
        partition: where the model is cut: ``"auto"`` (by counted operations), ``"uniform"`` (equally many blocks),
            ``"parameters"``, ``"balanced"`` (by measured times), :class:`~lightning_sdpipe.Balanced` with options, the
            number of blocks of each stage, or ``"placed"`` for the cut in the file of ``placement``. If ``num_stages``
            is a list, it may be a list for each pipeline, such as ``[[26], [13, 13], [15, 11]]``. Default: ``"auto"``.
        blocks: paths of the modules that form the chain, in the order in which they run; ``*`` stands for one part of a
            path. Default: ``None``: they are found.
        exchange: how tensors move between replicas: an object such as ``Exchange(EightBit(), overlap="step",
            hierarchy="hosts")``, or the name of a payload, such as ``"eight_bit"``. Refused where the method does not
            allow it. Default: ``None``: in full precision, without overlap or hierarchy.
        placement: the file of ``sdpipe place``, which says which device runs which stage. Refused on other hosts or
            another mesh. Default: ``None``: consecutive ranks form a pipeline.
        data: ``"dealt"`` deals batches to pipelines by their speed, and is refused where the method or the loader does
            not allow it; ``"sharded"`` gives each pipeline its own shard; ``"auto"`` deals where it can. Default:
            ``"auto"``.
        batch_by_speed: let the pipelines share one batch of N times the size: each trains as many of its ``N ×
            num_micro_batches`` micro-batches as its speed allows. Needs ``sync=AllReduce()`` and several micro-batches.
            Default: ``False``.
        delays: slowness to inject, from :mod:`lightning_sdpipe.heterogeneity`, to study stragglers. Default: ``None``.
        scheduler: address of a running ``sdpipe scheduler``, such as ``"tcp://10.0.0.1:5555"``; its policy replaces
            that of ``sync``. Default: ``None``: the environment variable ``SDPIPE_SCHEDULER``, or else a scheduler that
            rank 0 starts.
        scheduler_key_file: the workers' keys for that scheduler, from ``sdpipe keygen``. Default: ``None``: the
            environment variable ``SDPIPE_KEY_FILE``.
        log_dir: directory on rank 0's machine in which the scheduler that rank 0 starts writes every event and
            decision, into ``scheduler.jsonl``. Default: ``None``: no log.
        variance_correction: correct the second moments of an optimizer of the Adam family for the averaging of models
            (:class:`~lightning_sdpipe.optim.VarianceCorrection`), by the number of pipelines. Default: ``False``.
        dynamic_shapes: whether the output shapes of a block may differ between batches of equal shapes. Default:
            ``False``.
        save_distributed_checkpoint: let each rank write its own part of a checkpoint, which is then a directory;
            ``"async"`` writes in the background. Default: ``False``: rank 0 writes one file.
        gather_module: whether every worker gets the whole module again after a run; with a ``start_method`` other than
            ``"popen"``, only the process that you started does. Default: ``None``: if the module was whole before.
        on_nonfinite: ``"stop"`` ends the run when the loss, gradients or parameters of a pipeline are not finite,
            before its model reaches the others. In 16-bit mixed precision, where losses and gradients may overflow,
            only parameters count. ``"continue"`` does not check, nor does a run with the callback ``SpikeDetection``,
            which decides for itself. Default: ``"stop"``.
        on_checkpoint_error: ``"stop"`` ends the run when a checkpoint cannot be written (a full disk). ``"continue"``
            reports that and keeps the last whole checkpoint; it is refused with ``save_distributed_checkpoint``.
            Default: ``None``: ``"continue"`` in elastic runs and ``"stop"`` in others.
        timeout: longest time that a transfer or an answer may take; after it the run ends with an error. Default:
            ``timedelta(minutes=30)``.
        start_method: how the other processes of a machine start: ``"popen"`` runs the command line again; ``"fork"``
            copies this process, which is quicker and works in notebooks, before CUDA is used; ``"forkserver"`` and
            ``"spawn"`` pickle the Trainer, and need a script with ``if __name__ == "__main__":``. Default: ``"popen"``.
        process_group_backend: ``"gloo"``, ``"nccl"``, or one for each kind of device, such as ``"cpu:gloo,cuda:nccl"``.
            Default: ``None``: the accelerator's.
        accelerator: set by the Trainer. Default: ``None``.
        parallel_devices: the devices of this machine, set by the Trainer. Default: ``None``.
        cluster_environment: how processes are started and find each other, set by the Trainer. Default: ``None``:
            torchrun and SLURM are detected.
        checkpoint_io: reads and writes checkpoint files. Default: ``None``, Lightning's.
        precision_plugin: replaces ``Trainer(precision=…)``. Default: ``None``.

    Raises:
        ConfigurationError: an option is not known, its value is not allowed, or options do not go together. Options are
            checked here, before any process starts; the rest is checked before training. The message says what was
            given, what is allowed and what to do.
    """

    def __init__(
        self,
        num_stages: int | Sequence[int] = 1,
        sync: SyncMethod | PolicyConfig | str | None = None,
        schedule: Schedule = "1f1b",
        stages_per_worker: int = 2,
        num_micro_batches: int | None = None,
        partition: Partition | Sequence[Sequence[int]] | Literal["placed"] = "auto",
        blocks: Sequence[str] | None = None,
        *,
        exchange: Exchange | str | None = None,
        placement: str | Path | None = None,
        data: Literal["auto", "dealt", "sharded"] = "auto",
        batch_by_speed: bool = False,
        delays: Heterogeneity | None = None,
        scheduler: str | None = None,
        scheduler_key_file: str | Path | None = None,
        log_dir: str | Path | None = None,
        variance_correction: bool = False,
        dynamic_shapes: bool = False,
        save_distributed_checkpoint: bool | Literal["async"] = False,
        gather_module: bool | None = None,
        on_nonfinite: Literal["stop", "continue"] = "stop",
        on_checkpoint_error: Literal["stop", "continue"] | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **unknown: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "unknown", "__class__")}
        check_arguments(given, unknown, get_type_hints(SDPipeStrategy.__init__))
        job = elastic_job.from_environment(os.environ)
        self.options = resolve(given, job)
        environment = cluster_environment or environment_for(bool(self.options.depths))
        super().__init__(
            accelerator=accelerator,
            parallel_devices=None,
            cluster_environment=environment if job is None else ElasticEnvironment(job),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        if parallel_devices is not None:
            self.parallel_devices = list(parallel_devices)  # an elastic run takes its own of them

    brought_home: Mapping[str, Any] = {}
    """Results that rank 0's worker sent at the end, in a process that is not a worker."""
    _set_up: Setup | None = None
    """This worker's parts in the Trainer's run; None in a process that is not a worker, and before setup."""
    _origin: Origin
    """Where training begins."""
    _plans: tuple[nn.Module, Sequence[plan.Plan]] | None = None
    """The module, which is cut once, and the plan of each pipeline, or one for all."""
    _undo: Sequence[Callable[[], object]] = ()
    """Functions that undo what was done to this process, in order."""
    _restores_late: bool | None = None
    """Value of :attr:`restore_checkpoint_after_setup` in this run, once it is known."""
    _weights_only: bool | None = None
    """The argument of the Trainer's method, which Lightning does not pass on where it restores late."""
    _failed = False
    _lacks_checkpoint = False
    """True if the last checkpoint was not written."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: all but the past run, of which it keeps the results."""
        kept = {name: value for name, value in super().__getstate__().items() if name not in _OF_A_RUN}
        return kept | {"brought_home": self.costs()}

    def __repr__(self) -> str:
        """Return what other Trainers print when they refuse the strategy."""
        return f"<SDPipeStrategy of {self.num_stages} stages. {ONLY_LIGHTNING}>"

    # ----------------------------------------------------------------- options

    @property
    def num_stages(self) -> int:
        """The number M of stages of a pipeline; of the deepest one, where they differ."""
        return self.options.num_stages

    @property
    def num_micro_batches(self) -> int:
        """Parts of a mini-batch that are in the pipeline at the same time."""
        return self.options.num_micro_batches

    @property
    def sync(self) -> SyncMethod | PolicyConfig | str:
        """The synchronisation method, as it was given."""
        return self.options.sync

    @property
    def exchange(self) -> Exchange:
        """The exchange of tensors between the replicas of a stage."""
        return self.options.exchange

    @property
    def delays(self) -> Heterogeneity:
        """The delays that slow workers down while they train."""
        return self.options.delays

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """Devices of this machine: the Trainer's, or those of them that an elastic run uses."""
        return super().parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        job = self.options.job
        if job is not None and devices:
            if (said := job.overrides(len(devices), self.num_nodes)) is not None:
                rank_zero_info(said)
            devices = job.devices(devices)
        lightning_internals.set_parallel_devices(self, devices)

    # -------------------------------------------------------------------- launch

    def _configure_launcher(self) -> None:
        self._run.check()
        timeout = self.options.run_timeout.total_seconds()
        launcher = launcher_for(self, self.options.start_method, self._check_module, timeout)
        lightning_internals.set_launcher(self, launcher)

    def _check_module(self, trainer: Trainer, given: Mapping[str, Any]) -> None:
        module, options = self.lightning_module, self.options
        self._weights_only = given.get("weights_only")
        if module is None:
            return
        self._refuse_unfit(trainer)
        if not options.batch_by_speed:
            refuse_small_batches(module, given.get("train_dataloaders"), options.num_micro_batches)
        if not any(is_overridden(hook, module) for hook in ("setup", "configure_model")):  # else there is no model yet
            plan.check(module, options.blocks, options.all_cuts)

    def _refuse_unfit(self, trainer: Trainer) -> None:
        refuse_unsupported(trainer, self.options.total_stages > 1)
        if self.options.cuts and averaging_of(trainer.callbacks) is not None:  # type: ignore[attr-defined]
            raise ConfigurationError(
                "SDPipeWeightAveraging needs pipelines of one depth and cut, and those of "
                f"num_stages={list(self.options.depths)} are unlike: leave it out, or give one number of stages."
            )

    def setup_environment(self) -> None:
        self._set_up, self._restores_late = None, None
        environment = self.cluster_environment
        assert environment is not None
        with naming_the_port(environment):
            super().setup_environment()
        prepare_world(self.root_device)
        self._run.open()
        self._origin = Origin(shared_seed())
        lightning_internals.resume_from(self._trainer, partial(agree_on, groups=self.groups))

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
        host, port, timeout = environment.main_address, environment.main_port, self.options.run_timeout
        store = open_store(host, port, self.global_rank, self.world_size, one_machine, timeout)
        lightning_internals.open_process_group(
            environment,
            backend,
            timeout=lightning_internals.collective_timeout(self),
            device_id=None,  # NCCL connects when it is first used
            store=PrefixStore("sdpipe", store),
        )

    def _get_process_group_backend(self) -> str:
        """Return backends for both kinds of tensors that travel: headers and metrics are on the CPU."""
        device, default = self.root_device, super()._get_process_group_backend()
        return backends(device, self.parallel_devices or [], self.process_group_backend, default)

    # --------------------------------------------------------------------- parts

    @cached_property
    def _run(self) -> TrainingRun:
        """The run as this worker sees it: with a fixed number of workers, or elastic."""
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
        """Mesh of all workers' ranks. With a placement it is known once the ranks have gathered."""
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
        """What this worker does in each turn of the loop."""
        training = None if self._set_up is None else self._set_up.training
        assert training is not None, "setup makes it"
        return training

    @property
    def _batches(self) -> BatchSource:
        source = None if self._set_up is None else self._set_up.source
        assert source is not None, "setup makes it for a fit"
        return source

    @property
    def statistics(self) -> SyncStatistics:
        """Statistics of this worker's synchronisation: group sizes and seconds spent. In a process that has started all
        workers (``start_method="fork"`` and the like), rank 0's."""
        found: SyncStatistics = self._cost("statistics")
        return found

    @property
    def seconds_waiting_for_pipeline(self) -> float:
        """Seconds that this worker has waited for the neighbouring stages of its pipeline, validation included. In a
        process that has started all workers, rank 0's, as with :attr:`statistics`."""
        return float(self._cost("seconds_waiting_for_pipeline"))

    def costs(self) -> Mapping[str, Any]:
        """Return this worker's values of the two properties above; in a process that has started all workers, those
        that rank 0 sent."""
        if self._set_up is None or self._set_up.training is None:
            return self.brought_home
        training = self._set_up.training
        waiting = training.meter.seconds(*meter.FOR_NEIGHBOURS) - training.waited_before
        return {"statistics": training.sync.statistics, "seconds_waiting_for_pipeline": waiting}

    def _cost(self, name: str) -> Any:
        costs = self.costs()
        if name not in costs:
            raise RuntimeError(f"strategy.{name} is known once the strategy has run: call trainer.fit before.")
        return costs[name]

    @property
    def _parts(self) -> Assembled:
        return self._made.parts

    @property
    def _made(self) -> Setup:
        assert self._set_up is not None, "setup assembles the pipeline"
        return self._set_up

    @cached_property
    def _guard(self) -> CollectiveGuard:
        return CollectiveGuard(self.options.num_stages, self._metrics)

    def _metrics(self) -> list[Metric]:
        return [*metrics_of(self.module, self._trainer.callbacks).values()]  # type: ignore[attr-defined]

    # ------------------------------------------------------------------- setup

    @cached_property
    def _initialisation(self) -> Initialisation:
        return Initialisation()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Record what ``configure_model`` builds on ``meta``, so that it gets its initial values when it is cut."""
        with self._initialisation.recording():
            yield

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self._failed = False
        self.accelerator.setup(trainer)
        self._refuse_unfit(trainer)
        self._run.check_trainer(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        fits = trainer.state.fn == TrainerFn.FITTING
        made = self._cut(trainer, fits)
        made.prepare(self._from_leader, self._random_states)
        if fits:
            self.setup_optimizers(trainer)
        made.complete = True
        self.setup_precision_plugin()
        self._origin.data_seed = self._run.set_out(trainer, self._origin.data_seed)
        if fits:
            rank_zero_info(made.what_runs(self._plan_stages(trainer, fits), self.membership.client.address))

    def _cut(self, trainer: Trainer, fits: bool) -> Setup:
        """Cut the module: this rank keeps its stage, in flat buckets, equal on all pipelines."""
        options, module = self.options, self.module
        refuse_uninitialised(module)
        memory = same_memory(module)
        plans = self._plan_stages(trainer, fits)
        gathers = is_whole(module) if options.gather_module is None else options.gather_module
        parts = assemble(module, plans, self.groups, options, self._initialisation, self.root_device, memory)
        made = self._set_up = Setup(
            self, options, self._run, parts, self._origin, gathers, guard=self._guard, first_failure=self._first_failure
        )
        if fits and trainer.checkpoint_callbacks:
            made.checkpoints.check()
        return made

    def _plan_stages(self, trainer: Trainer, fits: bool) -> Sequence[plan.Plan]:
        """Return the plans of the module, which is cut once: when it runs again, each rank has already let go of the
        other stages."""
        if self._plans is None or self._plans[0] is not self.module:
            plans = partial(self._make_plans, trainer)
            cuts = self.options.all_cuts
            self._plans = self.module, self.membership.plan(cuts, plans) if fits else plans(cuts)
        return self._plans[1]

    def _make_plans(self, trainer: Trainer, cuts: Sequence[PipelineCut]) -> Sequence[plan.Plan]:
        options, device = self.options, self.root_device
        memory = memory_of(device, len(self.parallel_devices or [device]))
        timeout, batches = options.run_timeout.total_seconds(), options.num_micro_batches
        planning = Planning(trainer, cuts, options.blocks, batches, device, self._guard, timeout, memory)
        return plan_on_rank_zero(planning)

    def model_to_device(self) -> None:
        """No-op: :func:`keep_only` has moved this stage's part, and the rest stays on ``meta``."""

    def _from_leader(self, numbers: list[float]) -> list[float]:
        with self._together("the leader's clock"):
            return self._run.from_leader(numbers)

    def setup_optimizers(self, trainer: Trainer) -> None:
        with refuse_several_optimizers(self.options.total_stages > 1):
            super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            agree_on_groups(optimizer, self.module, self.groups)
            refuse_unfit(optimizer, self.precision_plugin, self.options.num_stages)
            refuse_unfit_momentum(optimizer, self.options.exchange.payload)
        if self.options.variance_correction:
            models = self.training.sync.models_averaged
            self.optimizers = [corrected(optimizer, models, self.options.sync) for optimizer in self.optimizers]
        self._made.checkpoints.take_part_of(self.optimizers)
        restore_groups(trainer, self.optimizers)

    # -------------------------------------------------------------------- data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments with which every stage of a pipeline sees the same batches. For prediction, whole batches are dealt
        out later."""
        if self.lightning_module is not None and self._trainer.predicting:
            return {"num_replicas": 1, "rank": 0}
        if self.lightning_module is None or not self._run.opened:  # the user looks at loaders before a run
            return {"num_replicas": self.mesh.num_pipelines, "rank": 0}
        return self._run.sampler if self._trainer.training else self._run.evaluation_sampler

    @property
    def reads_inputs(self) -> bool:
        """True if this worker runs the first blocks. Elsewhere a data module need not read inputs that only those
        blocks use, and may give :func:`~lightning_sdpipe.pipeline.data.stand_in` of their shape instead."""
        return self.mesh.locate(self.global_rank)[0] == 0

    def process_dataloader(self, dataloader: Any) -> Any:
        if not self._run.opened:  # the user looks at it before a run
            return dataloader
        if self.module.trainer.predicting:
            deal_batches(dataloader, self.groups)
        stage: Any = self._trainer.state.stage
        # which Lightning does afterwards, for a DataLoader
        lightning_internals.suggest_workers(self._trainer, dataloader, f"{stage.dataloader_prefix}_dataloader")
        made, num_pipelines = self._made, self.mesh.num_pipelines
        _, pipeline = self.groups.mesh.locate(self.groups.rank)
        loader = PipelineLoader(dataloader, pipeline, num_pipelines, self._seed_of_epoch)
        if self._trainer.training:
            loader.compare(self.groups, self.root_device)
            made.split = split_of(loader, num_pipelines)
            self._batches.deal(dataloader, made.split)
            compared, made.compared = made.compared, True
            if not compared and (said := unlike_samples(dataloader, num_pipelines, self.groups.stage)):
                rank_zero_warn(said)
        return loader

    def _seed_of_epoch(self) -> tuple[int, ...]:
        return self._origin.data_seed, self.module.trainer.current_epoch

    # ------------------------------------------------------------------- steps

    def on_train_start(self) -> None:
        self._parts.freezing.refuse_new_parameters()
        # by now Lightning has noted the signal handlers that it puts back at the end
        self._made.undo.append(meter.count_collections())
        self.training.begin()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # the user's hooks for the start of an epoch have run
            self._parts.freezing.refuse_new_parameters()
            tensors_of(self._parts.freezing.buckets)  # takes parameters back that were given other memory
        self.training.begin_batch(batch, self._batches)

    def training_step(self, batch: Any, *arguments: Any) -> Any:
        if not self.module.automatic_optimization:
            return self.training.step_by_hand(batch, arguments)
        training = self.training
        loss = training.step(batch, arguments, self._batches)
        return {**training.others, "loss": loss} if training.others and loss is not None else loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Average no gradients after the backwards in the ``with`` block: they accumulate until a backward after it."""
        backwards = self.training.backwards
        backwards.blocked = True
        try:
            yield
        finally:
            backwards.blocked = False

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if self.options.variance_correction:
            follow(optimizer, self.training.sync.models_averaged)
        if not self.module.automatic_optimization:
            step = partial(super().optimizer_step, optimizer, closure, model, **kwargs)
            return self.training.stepped_by_hand(optimizer, step)
        return self.training.update(optimizer, closure, model=model, **kwargs)

    def validation_step(self, batch: Any, *arguments: Any) -> Any:
        return self.training.evaluate("validation_step", batch, arguments, self.precision_plugin.val_step_context)

    def test_step(self, batch: Any, *arguments: Any) -> Any:
        return self.training.evaluate("test_step", batch, arguments, self.precision_plugin.test_step_context)

    def predict_step(self, batch: Any, *arguments: Any) -> Any:
        return self.training.evaluate("predict_step", batch, arguments, self.precision_plugin.predict_step_context)

    def on_validation_start(self) -> None:
        self._made.state.begin()
        if self._run.evaluations is not None and self._trainer.state.fn == TrainerFn.FITTING:
            evaluation = Evaluation(self._trainer, self._seed_of_epoch(), self._made.state.prints, self._first_failure)
            with self._first_failure:
                self._run.evaluations.begin(evaluation)

    def on_test_start(self) -> None:
        self._made.state.begin()

    on_predict_start = on_test_start

    def on_validation_end(self) -> None:
        self._parts.pipeline.settle()

    on_test_end = on_validation_end

    def on_predict_end(self) -> None:
        self._parts.pipeline.settle()
        loop = self._trainer.predict_loop
        if loop.return_predictions and (loaders := lightning_internals.loaders(loop)):
            collect(lightning_internals.predictions(self._trainer), loaders, self.groups)

    @property
    def is_global_zero(self) -> bool:
        return bool(self.global_rank == 0 and self._run.leads)

    @property
    def has_results(self) -> bool:
        """True if this worker's stage is the last one, where steps end and their results exist."""
        return self.groups.mesh.is_last(self.groups.rank)

    # --------------------------------------------------------------- collectives

    @property
    def _ends_alone(self) -> bool:
        """True while this process ends with an exception: other processes may not come to its collectives, so it does
        without them."""
        module = self.lightning_module
        return (
            module is not None
            and module._trainer is not None
            and self._trainer.state.status == TrainerStatus.INTERRUPTED
        )

    @property
    def _is_alone(self) -> bool:
        """True where there is no other process to ask: while this one ends with an exception, and before a run."""
        return self._ends_alone or not self._run.opened

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce over the replicas of this stage. Within a step nothing is reduced: no pipeline waits for another
        there, and logged values are reduced at the end of the epoch."""
        training = None if self._set_up is None else self._set_up.training
        if self._guard.in_step or (training is not None and training.updating) or self._is_alone:
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
        if self._is_alone:
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
        if self._is_alone:
            return
        asked = name == "post_setup"  # Lightning's name of that after the hooks
        with self._together("a barrier after the setup hooks" if asked else "a barrier", cause=_SETUP * asked):
            super().barrier(name)

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        self._guard.check("broadcast")
        if self._is_alone:
            return obj
        with self._together("a broadcast"):
            return super().broadcast(obj, src)

    @contextmanager
    def _together(self, purpose: str, group: dist.ProcessGroup | None = None, cause: str = "") -> Iterator[None]:
        """Bring this worker together with ``group``, by default all workers, for the block; they may be anywhere when
        it begins. Before a run there is no rank to wait for."""
        if self._set_up is not None and self._set_up.training is not None:
            self._set_up.training.come_together()
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

    # --------------------------------------------------------------- checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        io = with_whole_files(lightning_internals.given_checkpoint_io(self))
        lightning_internals.set_checkpoint_io(self, io)
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        lightning_internals.set_checkpoint_io(self, io)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """False if Lightning's own order holds: each worker has the whole module, with its weights, before it is set
        up. A cut module gets its stage's part, one on ``meta`` has no weights until then, and a newcomer to an elastic
        run gets another pipeline's state."""
        if self._restores_late is None:
            options = self.options
            cut = options.total_stages > 1 or bool(options.cuts)
            self._restores_late = cut or options.job is not None or not is_whole(self.module)
        return self._restores_late

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._set_up is None:  # other processes have run; this one has the whole module
            return self.module.state_dict()
        checkpoints = self._set_up.checkpoints
        over = self._run.membership is None or self._ends_alone  # nothing is under way
        if not (checkpoints.only_held or over):
            self._guard.check("save_checkpoint")
            self.training.pause()
        return checkpoints.module_state()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._run.opened:  # else the user loads a checkpoint
            self._origin.load(checkpoint.get("random_states", {}))
        if self._set_up is not None and self._set_up.complete:
            self._set_up.begin_where_it_ended()
        load_module_state(self.module, checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        own, made = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer, self._made
        with added_to(own, {} if made.training is None else made.training.sync.parameter_states()):
            gathered = made.checkpoints.optimizer_state(own)
            if "state" in gathered:  # a copy, since the added states are removed again
                gathered["state"] = {place: dict(state) for place, state in gathered["state"].items()}
            return gathered

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not self.optimizers:  # the user loads a checkpoint outside of a run
            return
        if not checkpoint["optimizer_states"]:
            raise ConfigurationError(
                "The checkpoint has no optimizer state, so training cannot continue from it. Perhaps a process that "
                "did not train saved it, such as the first one with start_method='fork': save in a callback such as "
                "ModelCheckpoint. Load its state_dict into the module to begin training with its weights."
            )
        states: dict[nn.Parameter, dict[str, Tensor]] = {}
        restore_groups(self._trainer, self.optimizers)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._made.checkpoints.load_optimizer(optimizer, state)
            states |= taken_from(optimizer)
        self.training.sync.load_parameter_states(states)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        made = self._set_up
        in_parts = made is not None and made.checkpoints.distributed and not self._ends_alone
        if made is not None and (in_parts or isinstance(self.checkpoint_io, WrappingCheckpointIO)):
            made.begun.add(str(filepath))
        if (files := whole_files(self.checkpoint_io)) is not None:
            files.publisher = None if in_parts else self._run.publisher
        if made is not None and in_parts:
            if broadcast_value(self._run.leads, 0, self.groups.world):  # its stages may hear of it at other times
                made.checkpoints.save(checkpoint, directory_of(filepath), self.checkpoint_io, self._run.publisher)
            if self._run.membership is None:  # the run is over: nothing is gained by going on meanwhile
                made.checkpoints.wait()
            return
        in_its_place = self.is_global_zero and is_distributed(filepath)  # a file would be moved into that directory
        try:
            with replacing(directory_of(filepath)) if in_its_place else nullcontext():
                super().save_checkpoint(checkpoint, filepath, storage_options)
        except NotWrittenError as error:
            if self.options.on_checkpoint_error == "stop":
                raise
            log.error("training continues, but %s.", error)
            self._lacks_checkpoint = True
        else:
            self._lacks_checkpoint = False

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if not is_distributed(checkpoint_path):
            asked = self._weights_only if weights_only is None else weights_only
            return super().load_checkpoint(checkpoint_path, asked)
        path = directory_of(checkpoint_path)
        if self._set_up is not None and self._set_up.complete:
            return self._set_up.checkpoints.load(path, self.checkpoint_io)
        return read_part(path, Ownership({}), None, self.groups, self.checkpoint_io)

    def remove_checkpoint(self, filepath: Any) -> None:
        made = self._set_up
        if made is not None:  # on all ranks alike: asking whether a file exists is a collective
            made.begun.discard(str(filepath))
        if self._lacks_checkpoint:  # the checkpoint to be removed may be the last one
            return
        if made is not None and self.is_global_zero:
            made.checkpoints.wait()
        super().remove_checkpoint(filepath)

    def _random_states(self) -> dict[str, Any]:
        """Return all that a resumed run needs to continue, counts of updates and rounds included."""
        if self._ends_alone:  # no other process is waited for
            return self._made.counted()
        return self._made.counted() | self._made.rounds_by_stage() | dict(self._run.random_states())

    # ---------------------------------------------------------------- the end

    def on_train_end(self) -> None:
        if self.is_global_zero:
            client = self.membership.client
            if (said := last_line(client.address, client.credentials)) is not None:
                rank_zero_info(said)

    @property
    def injector(self) -> DelayInjector:
        """Injector of ``delays``; it counts the seconds that this worker computed and those that it was made to
        sleep."""
        return self._parts.delays

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):  # else the process would end as if all were well
            exception.code = 128 + signal.SIGTERM
        self._failed = True
        if self._set_up is not None and self._set_up.training is not None:
            self._set_up.training.rendezvous.abandon()
        if self._run.membership is not None:
            self._run.membership.fail(exception)
        end_after_failure(self.launcher)

    def teardown(self) -> None:
        made, undo = self._set_up, ExitStack()
        if made is not None:
            undo.callback(made.take_apart, self._failed, self._keepers())
            undo.callback(change_back, made.trainer)
            for function in reversed(made.undo):
                undo.callback(function)
            made.undo.clear()
        for function in reversed(self._undo):
            undo.callback(function)
        self._undo = ()
        try:
            undo.close()  # calls all of them, whatever one raises
        finally:  # the others wait for this worker, or for word of its end
            self._run.close()
            with lightning_internals.without_module(self):
                super().teardown()  # moves the whole module to the CPU if it finds one; meta tensors cannot be moved

    def _keepers(self) -> list[int]:
        """Return the ranks of the processes that continue after the run: all, or one on each machine."""
        step = 1 if self.options.start_method == "popen" else self.num_processes
        return [*range(0, self.world_size, step)]

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """No-op: ``strategy/__init__.py`` registers ``"sdpipe"``, and not the names of this class's parents."""
