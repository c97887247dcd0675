"""The Lightning strategy: its options, and its hooks during a run, each a few calls into neighbouring packages."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdpipe import lightning_internals, meter
from lightning_sdpipe.checkpoints.whole_module import make_whole, tie_again, to_cpu
from lightning_sdpipe.data.loader import PipelineLoader
from lightning_sdpipe.data.same_samples import unlike_samples
from lightning_sdpipe.errors import ONLY_LIGHTNING
from lightning_sdpipe.exchange.buckets import tensors_of
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.heterogeneity.injector import DelayInjector, Heterogeneity
from lightning_sdpipe.loop.batch_source import split_of
from lightning_sdpipe.loop.optimizers import follow
from lightning_sdpipe.loop.predictions import collect, deal_batches
from lightning_sdpipe.partition.pipeline_cut import Partition
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.seeing.page import last_line
from lightning_sdpipe.strategy.setup_hooks import SetupHooks
from lightning_sdpipe.sync.synchronizer import SyncMethod
from lightning_sdpipe.worker.assembly import Assembled
from lightning_sdpipe.worker.elastic.shared_evaluation import Evaluation
from lightning_sdpipe.worker.launching import elastic_job
from lightning_sdpipe.worker.launching.environment import ElasticEnvironment, environment_for
from lightning_sdpipe.worker.launching.launcher import end_after_failure
from lightning_sdpipe.worker.options import Schedule, check_arguments, resolve

_OF_A_RUN = frozenset(
    {"_run", "_training", "_assembled", "_source", "_checkpoints", "_state", "_guard", "_first_failure", "_undo"}
    | {"_plans", "_initialisation"}
)


class SDPipeStrategy(SetupHooks):
    """Pipeline and data parallel training on unequal workers (SDPipe, VLDB 2023).

    ``devices × num_nodes`` workers form N pipelines of ``num_stages`` stages. Each stage runs its part of your own
    ``training_step``, and the N replicas of a stage average their models or gradients as ``sync`` says. The batch size
    is that of one pipeline. ``options`` holds the resolved arguments.

    Args:
        num_stages: M, the stages of a pipeline, which must divide the number of workers. Or a list with those of each
            pipeline, as ``[1, 2, 2]`` for five workers. Default: ``1``.
        sync: the synchronisation method, as ``AllReduce()`` or by its name, as ``"all_reduce"``, with its defaults. Or
            a policy of your own, or its import path, as ``"my_package.policies:RoundRobin"``. Default: ``None``, which
            is ``SemiDecentralized()``.
        schedule: the order of forwards and backwards. ``"1f1b"``, ``"gpipe"``, ``"interleaved_1f1b"`` and
            ``"zero_bubble"`` finish a mini-batch before the optimizer steps; ``"pipedream"`` overlaps mini-batches,
            with gradients that are up to M − 1 updates late. Default: ``"1f1b"``.
        stages_per_worker: stages that a worker runs under ``"interleaved_1f1b"`` and ``"zero_bubble"``, ``num_stages``
            apart; refused with other schedules. Default: ``2``.
        num_micro_batches: parts of a mini-batch that are in the pipeline at the same time; refused with
            ``"pipedream"``, which does not split mini-batches. Default: ``None``, which is ``num_stages``, or the
            largest of several.
        partition: where the model is cut: ``"auto"`` (by counted operations), ``"uniform"`` (equally many blocks),
            ``"parameters"``, ``"balanced"`` (by measured times), :class:`~lightning_sdpipe.Balanced` with options, or
            the number of blocks of each stage; ``"placed"`` for those in the file of ``placement``. With a list of
            ``num_stages`` it may be a list for each pipeline, as ``[[26], [13, 13], [15, 11]]``. Default: ``"auto"``.
        blocks: paths of the modules that form the chain, in the order in which they run, where ``*`` stands for one
            part of a path. Default: ``None``, which finds them.
        exchange: how tensors move between replicas, as ``Exchange(EightBit(), overlap="step", hierarchy="hosts")``, or
            the name of a payload, as ``"eight_bit"``; refused where the method does not allow it. Default: ``None``,
            which is in full precision, without overlap or hierarchy.
        placement: the file of ``sdpipe place``, which says which device runs which stage; refused on other hosts or
            another mesh. Default: ``None``, by which consecutive ranks form a pipeline.
        data: ``"dealt"`` deals batches to pipelines by their speed, and is refused where the method or the loader does
            not allow it; ``"sharded"`` gives each pipeline its own shard; ``"auto"`` deals where it can. Default:
            ``"auto"``.
        batch_by_speed: let the pipelines share one batch of N times the size, each as many of its
            ``N × num_micro_batches`` micro-batches as its speed allows; needs ``sync=AllReduce()`` and several
            micro-batches. Default: ``False``.
        delays: slowness to inject, from :mod:`lightning_sdpipe.heterogeneity`, in order to study stragglers. Default:
            ``None``.
        scheduler: address of a running ``sdpipe scheduler``, as ``"tcp://10.0.0.1:5555"``; its policy replaces that of
            ``sync``. Default: ``None``, which is the environment variable ``SDPIPE_SCHEDULER``, or else a scheduler
            that rank 0 starts.
        scheduler_key_file: the workers' keys for that scheduler, from ``sdpipe keygen``. Default: ``None``, which is
            the environment variable ``SDPIPE_KEY_FILE``.
        log_dir: directory on rank 0's machine for ``scheduler.jsonl``, with every event and decision of the scheduler
            that rank 0 starts. Default: ``None``, no log.
        variance_correction: correct the second moments of an optimizer of the Adam family for the averaging of models
            (:class:`~lightning_sdpipe.optim.VarianceCorrection`), by the number of pipelines. Default: ``False``.
        dynamic_shapes: the output shapes of a block may differ between batches of equal shapes. Default: ``False``.
        save_distributed_checkpoint: each rank writes its own part of a checkpoint, which then is a directory; with
            ``"async"`` in the background. Default: ``False``, by which rank 0 writes one file.
        gather_module: give every worker the whole module again after a run; with a ``start_method`` other than
            ``"popen"``, the user's process only. Default: ``None``, which gathers a module that was whole before.
        on_nonfinite: ``"stop"`` ends the run when the loss, gradients or parameters of a pipeline are not finite,
            before its model reaches the others; in 16-bit mixed precision, where losses and gradients may overflow,
            only when parameters are not. ``"continue"`` does not look. Default: ``"stop"``.
        on_checkpoint_error: ``"stop"`` ends the run when a checkpoint cannot be written (a full disk); ``"continue"``
            reports it, keeps the last whole checkpoint, and is refused with ``save_distributed_checkpoint``. Default:
            ``None``, which is ``"continue"`` in elastic runs and ``"stop"`` in others.
        timeout: longest time that a transfer or an answer may take before the run ends with an error. Default:
            ``timedelta(minutes=30)``.
        start_method: how the other processes of a machine start: ``"popen"`` runs the command line again; ``"fork"``
            copies this process, which is quicker and works in notebooks, before CUDA is used; ``"forkserver"`` and
            ``"spawn"`` pickle the Trainer. Default: ``"popen"``.
        process_group_backend: ``"gloo"``, ``"nccl"``, or one for each kind of device, as ``"cpu:gloo,cuda:nccl"``.
            Default: ``None``, which follows the accelerator.
        accelerator: set by the Trainer. Default: ``None``.
        parallel_devices: the devices of this machine, set by the Trainer. Default: ``None``.
        cluster_environment: how processes are started and find each other, set by the Trainer. Default: ``None``,
            which detects torchrun and SLURM.
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
            self.parallel_devices = list(parallel_devices)  # of which an elastic job takes its own

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: all but the run that has been, whose results it keeps."""
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
            compared, self._compared = self._compared, True
            if not compared and (said := unlike_samples(dataloader, self.mesh.num_pipelines, self.groups.stage)):
                rank_zero_warn(said)
        return loader

    def _seed_of_epoch(self) -> tuple[int, ...]:
        return self._data_seed, self.module.trainer.current_epoch

    # ------------------------------------------------------------------- steps

    def on_train_start(self) -> None:
        self._parts.freezing.refuse_new_parameters()
        # by now Lightning has noted the handlers of signals that it puts back in the end
        self._undo = [*self._undo, meter.count_collections()]
        self.training.begin()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # the user's hooks for the start of an epoch have run
            self._parts.freezing.refuse_new_parameters()
            tensors_of(self._parts.freezing.buckets)  # takes parameters back that were given other memory
        self.training.begin_batch(batch, self._batches)

    def training_step(self, batch: Any, *arguments: Any) -> Any:
        if not self.module.automatic_optimization:
            return self.training.step_by_hand(batch, arguments)
        return self.training.step(batch, arguments, self._batches)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Average no gradients after the backwards of the block: they accumulate until one after it."""
        backwards = self.training.backwards
        backwards.blocked = True
        try:
            yield
        finally:
            backwards.blocked = False

    def backward(self, closure_loss: Tensor, *arguments: Any, **kwargs: Any) -> Tensor:
        with self._first_failure:  # gradients may be averaged here
            return super().backward(closure_loss, *arguments, **kwargs)

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
        self._state.begin()
        if self._run.evaluations is not None and self._trainer.state.fn == TrainerFn.FITTING:
            evaluation = Evaluation(self._trainer, self._seed_of_epoch(), self._state.prints, self._first_failure)
            with self._first_failure:
                self._run.evaluations.begin(evaluation)

    def on_test_start(self) -> None:
        self._state.begin()

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
        self._undo, self._compared = (), False
        try:
            if self._assembled is not None:
                self._take_apart(self._assembled)
        finally:  # the others wait for this worker, or for word of its end
            self._run.close()
            with lightning_internals.without_module(self):
                super().teardown()  # moves the whole module to the CPU if it finds one; meta tensors cannot be moved

    def _take_apart(self, parts: Assembled) -> None:
        """Give the user's module back as other strategies leave it, once the last checkpoint is written."""
        self._checkpoints.wait()
        parts.cut_model.restore()
        if not self._failed:  # else tensors may be in use, and where the error came from is what counts
            to_cpu(self.module)
        parts.freezing.buckets.clear()  # memory that only they hold
        if self._gathers and not self._failed:
            self._make_whole(parts)
        tie_again(self.module, parts.ownership)

    def _make_whole(self, parts: Assembled) -> None:
        """Make the module whole in all processes that go on, as other strategies leave it."""
        ends_here = self.options.start_method != "popen"  # all but one process of each machine
        keepers = [rank for rank in range(self.world_size) if not ends_here or rank % self.num_processes == 0]
        if set(keepers) & set(self.mesh.pipeline_ranks(self._worker.pipeline)):
            with self._first_failure:
                make_whole(self.module, parts.ownership, self.groups, self.global_rank in keepers)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """No-op: the package registers ``"sdpipe"`` when it is imported, not this class's parents' names."""
