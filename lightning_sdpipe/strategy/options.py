"""What users say to :class:`~lightning_sdpipe.strategy.SDPipeStrategy`: the one list of its options."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.heterogeneity.delays import Delays
from lightning_sdpipe.heterogeneity.injector import Heterogeneity
from lightning_sdpipe.partition import plan
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.strategy import option_checks
from lightning_sdpipe.sync import SemiDecentralized, capabilities
from lightning_sdpipe.sync.measured_groups import with_measured_groups
from lightning_sdpipe.sync.methods import method_of
from lightning_sdpipe.sync.synchronizer import SyncMethod
from lightning_sdpipe.topology.placement_file import placed_blocks, read_placement
from lightning_sdpipe.worker.assembly import AssemblyOptions
from lightning_sdpipe.worker.launching import elastic_job
from lightning_sdpipe.worker.launching.elastic_job import ElasticEnvironment
from lightning_sdpipe.worker.scheduler_connection import scheduler_log, standing_scheduler

Schedule = Literal["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "pipedream"]


class SDPipeOptions(DDPStrategy):
    """Checks and stores the options.

    Args:
        num_stages: M, the stages of a pipeline; must divide the number of workers.
        sync: the synchronisation method, from :mod:`lightning_sdpipe.sync`; SDPipe's by default. Or the values of a
            policy of your own, or its import path, as in ``"my_package.policies:RoundRobin"``.
        exchange: how tensors move between the replicas of a stage, as
            ``Exchange(EightBit(), overlap="step", hierarchy="hosts")``; in full precision, at once and between any two
            workers alike by default.
        schedule: the order of forwards and backwards: ``"1f1b"`` and ``"gpipe"`` finish a mini-batch before the
            optimizer steps, and so do ``"interleaved_1f1b"`` and ``"zero_bubble"``, which cut the model into
            ``num_stages × stages_per_worker`` stages; ``"pipedream"`` overlaps mini-batches, with gradients that are
            up to M − 1 steps late.
        stages_per_worker: how many stages, ``num_stages`` apart, a worker runs under these two schedules.
        num_micro_batches: parts of a mini-batch that are in the pipeline at the same time; ``num_stages`` by default.
            ``"pipedream"`` does not split mini-batches.
        partition: ``"uniform"`` (equally many blocks), ``"parameters"``, ``"balanced"`` (by measured times) or
            :class:`~lightning_sdpipe.partition.plan.Balanced` with options, or the number of blocks of each stage;
            ``"placed"`` for those that ``placement`` names.
        blocks: paths of the modules that form the chain, in the order in which they run, if the automatic choice does
            not fit; ``*`` stands for one part of a path.
        placement: file that says which device runs which stage of which pipeline, as ``sdpipe place`` writes it; by
            default consecutive ranks form a pipeline.
        data: ``"dealt"``: batches go to the pipelines by their speed, so that an epoch is as fast as all of them
            together; ``"sharded"``: each pipeline trains its own shard; ``"auto"``: dealt where ``sync`` and the loader
            allow it, sharded elsewhere.
        batch_by_speed: with ``sync=AllReduce()``, all pipelines train one batch of N times the size together, each as
            many of its ``N × num_micro_batches`` micro-batches as its speed allows.
        delays: what slows workers down while they train, to study stragglers; from
            :mod:`lightning_sdpipe.heterogeneity`.
        scheduler: address of a scheduler that runs already (``sdpipe scheduler``), whose policy then holds instead of
            that of ``sync``; the environment variable ``SDPIPE_SCHEDULER`` by default. Else rank 0 starts one.
        scheduler_key_file: the workers' keys for it, as ``sdpipe keygen`` made them; ``SDPIPE_KEY_FILE`` by default.
        log_dir: directory on rank 0's machine that gets ``scheduler.jsonl``, with every event and decision of the
            scheduler that rank 0 starts; ``sdpipe replay`` reads it.
        variance_correction: correct the second moments of an optimizer of the Adam family for the averaging of models
            (:class:`~lightning_sdpipe.optim.VarianceCorrection`), by the number of pipelines.
        dynamic_shapes: a block's output shape may differ between batches of equal shapes.
        save_distributed_checkpoint: every rank writes its own part of a checkpoint, a directory then, instead of rank 0
            all of a file; with ``"async"`` in the background.
        gather_module: give every worker the whole module again when a run has ended (with another start method than
            ``"popen"``, the user's process only); by default if it was whole before, and not built on ``meta``.
        on_nonfinite: ``"stop"`` ends the run when the loss, the gradients or the parameters of a pipeline are not
            finite, before its model reaches the others; in 16-bit mixed precision, where losses and gradients may
            overflow, only when parameters are not. ``"continue"`` does not look.
        on_checkpoint_error: ``"stop"`` ends the run when a checkpoint cannot be written (a full disk); ``"continue"``
            says so each time, and keeps the last one that is whole. By default elastic runs continue, and others stop.
        timeout: how long any transfer or answer may take before the run ends with an error.
        start_method: how the other processes of a machine start; as for
            :class:`~lightning.pytorch.strategies.DDPStrategy`, like all that follow.
        process_group_backend: ``"gloo"``, ``"nccl"`` or both by kind of device; as the accelerator asks by default.
        accelerator: set by the Trainer, as are the next two.
        parallel_devices: of this machine.
        cluster_environment: knows who starts processes, and where they meet.
        checkpoint_io: writes and reads checkpoint files.
        precision_plugin: instead of ``Trainer(precision=...)``.

    Raises:
        ConfigurationError: at the first moment at which something is known not to work.
    """

    def __init__(
        self,
        num_stages: int = 1,
        sync: SyncMethod | PolicyConfig | str | None = None,
        schedule: Schedule = "1f1b",
        stages_per_worker: int = 2,
        num_micro_batches: int | None = None,
        partition: plan.Partition | Literal["placed"] = "uniform",
        blocks: Sequence[str] | None = None,
        *,
        exchange: Exchange | None = None,
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
        option_checks.check(given, unknown, get_type_hints(SDPipeOptions.__init__))
        self._job = job = elastic_job.from_environment(os.environ)
        if job is not None:
            num_stages, data, cluster_environment = job.num_stages(num_stages), job.data(data), ElasticEnvironment(job)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=None if parallel_devices is None else list(parallel_devices),
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.num_stages = num_stages
        self.sync = sync if sync is not None else SemiDecentralized()
        self.schedule = schedule
        self.stages_per_worker = stages_per_worker if schedule in option_checks.LOOPED else 1
        self.num_micro_batches = 1 if schedule == "pipedream" else num_micro_batches or num_stages
        self.placement = None if placement is None else read_placement(placement)
        self.partition = placed_blocks(self.placement) if partition == "placed" else partition
        self._in_flight: plan.InFlight | None = None
        if isinstance(partition, plan.Balanced) and partition.memory is not None:
            self._in_flight = plan.in_flight(schedule, num_stages, self.num_micro_batches)
        self.blocks = blocks
        self.delays: Heterogeneity = delays if delays is not None else Delays()
        self.variance_correction = variance_correction
        self.dynamic_shapes = dynamic_shapes
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self.gather_module = gather_module
        self.on_nonfinite = on_nonfinite
        self.on_checkpoint_error = on_checkpoint_error or ("stop" if job is None else "continue")
        self._run_timeout = timeout
        self._method = with_measured_groups(method_of(self.sync), num_stages, self.placement is not None)
        self.exchange = exchange if exchange is not None else Exchange()
        self.data = data
        self.batch_by_speed = batch_by_speed
        dealt = data == "dealt" and job is None  # in an elastic job they are in any case
        asked = capabilities.Combination(self.sync, self.exchange, schedule, num_stages, dealt, batch_by_speed)
        capabilities.check(self._method, asked)
        if batch_by_speed:
            option_checks.check_division(schedule, self.num_micro_batches)
        self._standing_scheduler = standing_scheduler(scheduler, scheduler_key_file)
        if job is not None:
            standing = self._standing_scheduler
            elastic_job.require_scheduler(job, None if standing is None else standing.address)
        self._scheduler_log = scheduler_log(log_dir, self._standing_scheduler)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """Of this machine: those of the Trainer, or of them those of an elastic job."""
        return super().parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if self._job is not None and devices:
            if (said := self._job.overrides(len(devices), self.num_nodes)) is not None:
                rank_zero_info(said)
            devices = self._job.devices(devices)
        self._parallel_devices = devices

    @property
    def total_stages(self) -> int:
        """Of a pipeline."""
        return self.num_stages * self.stages_per_worker

    @property
    def division(self) -> tuple[int, int]:
        """With ``batch_by_speed``: micro-batches of a pipeline on average, and what it needs a multiple of."""
        return self.num_micro_batches, self.num_stages if self.schedule in option_checks.LOOPED else 1

    @property
    def pipeline_options(self) -> AssemblyOptions:
        """Those that say how pipelines run."""
        return AssemblyOptions(
            self.num_stages,
            self.schedule,
            self.stages_per_worker,
            self.num_micro_batches,
            self.dynamic_shapes,
            self.delays,
            self._run_timeout,
        )
