"""The Lightning strategy: its options, and its hooks during a run, each a few calls into neighbouring packages."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.checkpoints.whole_module import make_whole, tie_again, to_cpu
from lightning_sdpipe.data.loader import PipelineLoader
from lightning_sdpipe.errors import ONLY_LIGHTNING
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.heterogeneity.injector import DelayInjector, Heterogeneity
from lightning_sdpipe.loop.optimizers import follow
from lightning_sdpipe.loop.predictions import collect, deal_batches
from lightning_sdpipe.loop.refusals import refuse_new_parameters
from lightning_sdpipe.loop.resume_position import split_of
from lightning_sdpipe.partition.pipeline_cut import Partition
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.seeing.page import last_line
from lightning_sdpipe.strategy import option_checks
from lightning_sdpipe.strategy.setup_hooks import SetupHooks
from lightning_sdpipe.sync.synchronizer import SyncMethod
from lightning_sdpipe.worker.assembly import Assembled
from lightning_sdpipe.worker.launching import elastic_job
from lightning_sdpipe.worker.launching.environment import ElasticEnvironment, environment_for
from lightning_sdpipe.worker.launching.launcher import end_after_failure
from lightning_sdpipe.worker.options import Schedule, resolve


class SDPipeStrategy(SetupHooks):
    """Pipeline and data parallel training on unequal workers (SDPipe, VLDB 2023).

    ``devices × num_nodes`` workers form N pipelines of ``num_stages`` stages. Each stage runs its part of the user's
    own steps; the replicas of a stage stay synchronised by the method ``sync``, by default by averaging parameters in
    groups. ``options`` holds the resolved arguments, as :class:`~lightning_sdpipe.worker.options.Options`.

    Args:
        num_stages: M, the stages of a pipeline; must divide the number of workers. Or a list: those of each pipeline,
            as ``[1, 2, 2]`` for five workers, which torchrun may then start with unlike numbers on each machine.
        sync: the synchronisation method, from :mod:`lightning_sdpipe.sync`, or its name, as in ``"all_reduce"``, for
            its defaults; SDPipe's by default. Or the values of a policy of your own, or its import path, as in
            ``"my_package.policies:RoundRobin"``.
        exchange: how tensors move between the replicas of a stage, as
            ``Exchange(EightBit(), overlap="step", hierarchy="hosts")``, or the name of a payload, as in
            ``"eight_bit"``; in full precision, at once and between any two workers alike by default.
        schedule: the order of forwards and backwards: ``"1f1b"`` and ``"gpipe"`` finish a mini-batch before the
            optimizer steps, and so do ``"interleaved_1f1b"`` and ``"zero_bubble"``, which cut the model into
            ``num_stages × stages_per_worker`` stages; ``"pipedream"`` overlaps mini-batches, with gradients that are
            up to M − 1 steps late.
        stages_per_worker: how many stages, ``num_stages`` apart, a worker runs under these two schedules.
        num_micro_batches: parts of a mini-batch that are in the pipeline at the same time; ``num_stages`` by default,
            the largest of several. ``"pipedream"`` does not split mini-batches.
        partition: ``"uniform"`` (equally many blocks), ``"parameters"``, ``"balanced"`` (by measured times) or
            :class:`~lightning_sdpipe.partition.pipeline_cut.Balanced` with options, or the number of blocks of each
            stage; ``"placed"`` for those that ``placement`` names. With a list of ``num_stages``, a list for each
            pipeline, as ``[[26], [13, 13], [15, 11]]``.
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
        cluster_environment: knows what starts processes, and where they meet.
        checkpoint_io: writes and reads checkpoint files.
        precision_plugin: instead of ``Trainer(precision=...)``.

    Raises:
        ConfigurationError: at the first moment at which something is known not to work.
    """

    def __init__(
        self,
        num_stages: int | Sequence[int] = 1,
        sync: SyncMethod | PolicyConfig | str | None = None,
        schedule: Schedule = "1f1b",
        stages_per_worker: int = 2,
        num_micro_batches: int | None = None,
        partition: Partition | Sequence[Sequence[int]] | Literal["placed"] = "uniform",
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
        option_checks.check(given, unknown, get_type_hints(SDPipeStrategy.__init__))
        job = elastic_job.from_environment(os.environ)
        self.options = resolve(given, job)
        environment = cluster_environment or environment_for(bool(self.options.depths))
        super().__init__(
            accelerator=accelerator,
            parallel_devices=None if parallel_devices is None else list(parallel_devices),
            cluster_environment=environment if job is None else ElasticEnvironment(job),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

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
        """Devices of this machine: those of the Trainer, or among them those of an elastic job."""
        return super().parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        job = self.options.job
        if job is not None and devices:
            if (said := job.overrides(len(devices), self.num_nodes)) is not None:
                rank_zero_info(said)
            devices = job.devices(devices)
        lightning_internals.set_parallel_devices(self, devices)

    # -------------------------------------------------------------------- data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments with which every stage of a pipeline sees the same batches. For prediction, whole batches are dealt
        out later."""
        if self.module.trainer.predicting:
            return {"num_replicas": 1, "rank": 0}
        return self._run.sampler if self.module.trainer.training else self._run.evaluation_sampler

    @property
    def reads_inputs(self) -> bool:
        """True if this worker runs the first blocks. A data module whose inputs go to those alone may leave them unread
        elsewhere, and give :func:`~lightning_sdpipe.pipeline.data.stand_in` of their shape."""
        return self.mesh.locate(self.global_rank)[0] == 0

    def process_dataloader(self, dataloader: Any) -> PipelineLoader:
        if self.module.trainer.predicting:
            deal_batches(dataloader, self.groups)
        loader = PipelineLoader(dataloader, self._worker.pipeline, self.mesh.num_pipelines, self._seed_of_epoch)
        if self._trainer.training:
            loader.compare(self.groups, self.root_device)
            self._split = split_of(loader, self.mesh.num_pipelines)
            self._batches.deal(dataloader, self._split)
        return loader

    def _seed_of_epoch(self) -> tuple[int, ...]:
        return self._data_seed, self.module.trainer.current_epoch

    # ------------------------------------------------------------------- steps

    def on_train_start(self) -> None:
        refuse_new_parameters(self.module, self._parts.ownership)
        self.training.begin()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.training.begin_batch(batch, self._batches)

    def training_step(self, batch: Any, *arguments: Any) -> Tensor:
        return self.training.step(batch, arguments, self._batches)

    def backward(self, closure_loss: Tensor, *arguments: Any, **kwargs: Any) -> Tensor:
        with self._first_failure():  # gradients may be averaged here
            return super().backward(closure_loss, *arguments, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if self.options.variance_correction:
            follow(self.optimizers[0], self.training.sync.models_averaged)
        return self.training.update(optimizer, closure, model=model, **kwargs)

    def validation_step(self, batch: Any, *arguments: Any) -> Any:
        return self.training.evaluate("validation_step", batch, arguments, self.precision_plugin.val_step_context)

    def test_step(self, batch: Any, *arguments: Any) -> Any:
        return self.training.evaluate("test_step", batch, arguments, self.precision_plugin.test_step_context)

    def predict_step(self, batch: Any, *arguments: Any) -> Any:
        return self.training.evaluate("predict_step", batch, arguments, self.precision_plugin.predict_step_context)

    def on_validation_start(self) -> None:
        self._state.begin()

    on_test_start = on_predict_start = on_validation_start

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

    # ---------------------------------------------------------------- the end

    def on_train_end(self) -> None:
        if self.is_global_zero:
            client = self.membership.client
            if (said := last_line(client.address, client.credentials)) is not None:
                rank_zero_info(said)

    @property
    def injector(self) -> DelayInjector:
        """Injector of ``delays``: seconds that this worker computed, and that it was made to sleep."""
        return self._parts.delays

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):  # else the process would end as if all were well
            exception.code = 128 + signal.SIGTERM
        self._failed = True
        if self._training is not None:
            self._training.rendezvous.abandon()
        if self._run.membership is not None:
            self._run.membership.fail(exception)
        end_after_failure(self.launcher)

    def teardown(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = ()
        if self._assembled is not None:
            self._checkpoints.wait()
            self._assembled.cut_model.restore()
            if not self._failed:  # else tensors may be in use, and where the error came from is what counts
                to_cpu(self.module)
            self._assembled.freezing.buckets.clear()  # memory that only they hold
            if self._gathers and not self._failed:
                self._make_whole(self._assembled)
            tie_again(self.module, self._assembled.ownership)
        self._run.close()
        with lightning_internals.without_module(self):
            super().teardown()  # moves the whole module to the CPU if it finds one; meta tensors cannot be moved

    def _make_whole(self, parts: Assembled) -> None:
        """Make the module whole in all processes that go on, as other strategies leave it."""
        ends_here = self.options.start_method != "popen"  # all but one process of each machine
        keepers = [rank for rank in range(self.world_size) if not ends_here or rank % self.num_processes == 0]
        if set(keepers) & set(self.mesh.pipeline_ranks(self._worker.pipeline)):
            with self._first_failure():
                make_whole(self.module, parts.ownership, self.groups, self.global_rank in keepers)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """No-op: the package registers ``"sdpipe"`` when it is imported, not this class's parents' names."""
