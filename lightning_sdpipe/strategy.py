"""The Lightning strategy: its hooks, in the order of a run's life, each a few calls into the packages beside it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdpipe import options
from lightning_sdpipe.assembly import Assembled, Options, assemble
from lightning_sdpipe.checkpoints import random_states
from lightning_sdpipe.checkpoints.distributed import is_distributed, replacing
from lightning_sdpipe.checkpoints.files import WholeFiles
from lightning_sdpipe.checkpoints.whole_module import is_whole, make_whole, mark_parts, to_cpu
from lightning_sdpipe.checkpoints.worker import Checkpoints
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.groups import ProcessGroups
from lightning_sdpipe.heterogeneity.delays import Delays
from lightning_sdpipe.heterogeneity.injector import DelayInjector, Heterogeneity
from lightning_sdpipe.launching import hydra_job, job
from lightning_sdpipe.launching.launcher import CheckingLauncher, WholeModelLauncher
from lightning_sdpipe.membership import Membership
from lightning_sdpipe.mesh import Mesh
from lightning_sdpipe.optim import VarianceCorrection, is_adam_family
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.partition import plan
from lightning_sdpipe.partition.materialise import Initialisation
from lightning_sdpipe.pipeline.data import PipelineLoader, check_equal, check_equal_split, shared_seed
from lightning_sdpipe.pipeline.fetcher import MeetingFetcher
from lightning_sdpipe.pipeline.micro_batches import split
from lightning_sdpipe.pipeline.pipedream import PipeDreamPipeline
from lightning_sdpipe.pipeline.stage_runner import Step
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.sync import SemiDecentralized
from lightning_sdpipe.sync.meeting import Meeting
from lightning_sdpipe.sync.methods import method_of
from lightning_sdpipe.sync.rendezvous import standing_scheduler
from lightning_sdpipe.sync.synchronizer import Replica, SyncMethod, SyncStatistics
from lightning_sdpipe.trainer import finetuning, lockstep
from lightning_sdpipe.trainer.appointments import Appointments
from lightning_sdpipe.trainer.clipping import clip_over_stages
from lightning_sdpipe.trainer.closures import STEPPED_ALONE, once, refuse_repeated_evaluation
from lightning_sdpipe.trainer.draws import Draws
from lightning_sdpipe.trainer.epoch_callback import EpochCallback
from lightning_sdpipe.trainer.last_stage import gather_metrics_over, leave_results_to_the_last_stage
from lightning_sdpipe.trainer.loss_scale import agree_on_overflow, loss_scale, refuse_own_unscaling
from lightning_sdpipe.trainer.nonfinite import Watch
from lightning_sdpipe.trainer.planning import Planning, plan_on_rank_zero
from lightning_sdpipe.trainer.predictions import collect, deal_batches
from lightning_sdpipe.trainer.readiness import Readiness, last_wait
from lightning_sdpipe.trainer.refusals import (
    leave_out_example,
    refuse_new_parameters,
    refuse_several_optimizers,
    refuse_unsupported,
)
from lightning_sdpipe.trainer.whereabouts import Whereabouts

Schedule = Literal["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "pipedream"]

_T = TypeVar("_T")

_GRACE = 10.0  # seconds that other processes get to end by themselves after a failure


class SDPipeStrategy(DDPStrategy):
    """Pipeline and data parallel training on unequal workers (SDPipe, VLDB 2023).

    ``devices × num_nodes`` workers form N pipelines of ``num_stages`` stages. Each stage runs its part of the user's
    own steps; the replicas of a stage keep together as ``sync`` says, by default by averaging parameters in groups.

    Args:
        num_stages: M, the stages of a pipeline; must divide the number of workers.
        sync: the synchronisation method, from :mod:`lightning_sdpipe.sync`; SDPipe's by default. Or the values of a
            policy of your own, or its import path, as in ``"my_package.policies:RoundRobin"``.
        schedule: the order of forwards and backwards: ``"1f1b"`` and ``"gpipe"`` finish a mini-batch before the
            optimizer steps, and so do ``"interleaved_1f1b"`` and ``"zero_bubble"``, which cut the model into
            ``num_stages × stages_per_worker`` stages; ``"pipedream"`` overlaps mini-batches, with gradients that are
            up to M − 1 steps late.
        stages_per_worker: how many stages, ``num_stages`` apart, a worker runs under these two schedules.
        num_micro_batches: parts of a mini-batch that are in the pipeline at the same time; ``num_stages`` by default.
            ``"pipedream"`` does not split mini-batches.
        partition: ``"uniform"`` (equally many blocks), ``"parameters"``, ``"balanced"`` (by measured times) or
            :class:`~lightning_sdpipe.partition.plan.Balanced` with options, or the number of blocks of each stage.
        blocks: paths of the modules that form the chain, in the order in which they run, if the automatic choice does
            not fit; ``*`` stands for one part of a path.
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
        partition: plan.Partition = "uniform",
        blocks: Sequence[str] | None = None,
        delays: Heterogeneity | None = None,
        scheduler: str | None = None,
        scheduler_key_file: str | Path | None = None,
        log_dir: str | Path | None = None,
        variance_correction: bool = False,
        dynamic_shapes: bool = False,
        save_distributed_checkpoint: bool | Literal["async"] = False,
        gather_module: bool | None = None,
        on_nonfinite: Literal["stop", "continue"] = "stop",
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
        options.check(given, unknown, get_type_hints(SDPipeStrategy.__init__))
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
        self._method = method_of(self.sync)
        self.schedule = schedule
        self.stages_per_worker = stages_per_worker if schedule in options.LOOPED else 1
        self.num_micro_batches = 1 if schedule == "pipedream" else num_micro_batches or num_stages
        self.partition = partition
        self.blocks = blocks
        self.delays: Heterogeneity = delays if delays is not None else Delays()
        self._standing_scheduler = standing_scheduler(scheduler, scheduler_key_file)
        if self._standing_scheduler is not None and log_dir is not None:
            raise ConfigurationError(
                f"log_dir={str(log_dir)!r} does not reach the scheduler at {self._standing_scheduler.address}, which "
                "runs already; leave it out, and start that one with --log."
            )
        self._scheduler_log = None if log_dir is None else Path(log_dir, "scheduler.jsonl")
        self.variance_correction = variance_correction
        self.dynamic_shapes = dynamic_shapes
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self.gather_module = gather_module
        self.on_nonfinite = on_nonfinite
        self._run_timeout = timeout
        self._groups: ProcessGroups | None = None
        self._membership: Membership | None = None
        self._assembled: Assembled | None = None
        self._undo: Sequence[Callable[[], None]] = ()
        self._unmark: Callable[[], None] | None = None
        self._watch: Watch | None = None
        self._initialisation = Initialisation()
        self._failed = self._gathers = False
        self._plan: tuple[nn.Module, plan.Plan] | None = None
        self._whereabouts = Whereabouts(num_stages)
        self._update_follows = False
        self._readiness = Readiness("backward", self._announce)
        self._last_loss = torch.zeros(())
        self._accumulated = False  # gradients of earlier mini-batches wait for the next update
        self._mini_batches = self._updates = 0

    # ------------------------------------------------------------------ launch

    @property
    def mesh(self) -> Mesh:
        return Mesh.build(self.num_nodes * self.num_processes, self.num_stages)

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        job.begin()
        mesh = self.mesh  # refuses a number of workers that does not fit
        registry.build(self._method.policy, mesh.num_stages, mesh.num_pipelines)  # and values that do not fit the mesh
        if self._start_method == "popen":
            self._launcher = CheckingLauncher(
                self.cluster_environment,
                self.num_processes,
                self.num_nodes,
                self._check_module,
                self._run_timeout.total_seconds(),
            )
        else:
            self._launcher = WholeModelLauncher(self, self._start_method, self._check_module, _GRACE)

    def _check_module(self) -> None:
        module = self.lightning_module
        if module is not None and not is_overridden("configure_model", module):  # else there is no model yet
            plan.check(module, self.blocks, self._total_stages, self.partition)

    def setup_environment(self) -> None:
        try:
            super().setup_environment()
        except RuntimeError as error:
            if "EADDRINUSE" in str(error) or "address already in use" in str(error):
                raise ConfigurationError(
                    f"MASTER_PORT={self.cluster_environment and self.cluster_environment.main_port} is in use by "
                    "another program. Choose another one, or unset MASTER_PORT to let the system choose."
                ) from error
            raise
        if self._groups is None:
            self._groups = ProcessGroups.open(self.mesh, self._run_timeout)
        self._data_seed = shared_seed()
        self._membership = Membership(
            self.mesh,
            self._method.policy,
            self._standing_scheduler,
            self._bind,
            self._run_timeout.total_seconds(),
            self._give_up,
            self._scheduler_log,
        )

    def _get_process_group_backend(self) -> str:
        """By default both kinds of tensors can travel: headers and metrics are on the CPU."""
        if self._process_group_backend or self.root_device.type == "cpu":
            return super()._get_process_group_backend()
        return f"cpu:gloo,{self.root_device.type}:{super()._get_process_group_backend()}"

    def _bind(self) -> str:
        assert self.cluster_environment is not None
        if self.num_nodes == 1:
            return "tcp://127.0.0.1:*"
        host = socket.gethostbyname(self.cluster_environment.main_address)  # ZeroMQ binds to addresses only
        return f"tcp://{host}:*"

    # ------------------------------------------------------------------- setup

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self._failed = False
        self.accelerator.setup(trainer)
        refuse_unsupported(trainer, self.schedule, self.num_stages)
        self.model = self.precision_plugin.convert_module(self.model)
        self._cut(trainer)
        appointments = Appointments(lockstep.clocks(trainer), self.broadcast)
        lockstep.release(trainer, self._sync, self._sit_out, appointments)
        self._put_first(
            trainer, EpochCallback(self.groups, self._pause, self._random_states, appointments, self._first_failure)
        )
        self._adapt(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _adapt(self, trainer: Any) -> None:
        """Makes what Lightning, torchmetrics and the precision plugin do per rank right for a stage of a pipeline."""
        self._draws = Draws(
            trainer,
            self._parts.cut_model.streams,
            lambda: self._data_seed,
            self._worker.pipeline,
            self.mesh.num_pipelines,
        )
        buckets = self._parts.freezing.buckets
        result_hook = partial(self._whereabouts.result_hook, parameters=lambda: [bucket.buffer for bucket in buckets])
        self._undo = [
            self._draws.undo,
            leave_results_to_the_last_stage(self.module, trainer.callbacks, self.has_results, result_hook),
            leave_out_example(self.module) if self.num_stages > 1 else lambda: None,
            gather_metrics_over(self.module, self.groups.stage),
            finetuning.adapt(trainer.callbacks, lambda: self._checkpoints.whole_groups(self.optimizers[0])),
        ]
        self._readiness = Readiness(last_wait(trainer, self.num_stages), self._announce)
        known, voted = partial(self._readiness.reached, "norm"), partial(self._readiness.reached, "vote")
        clip_over_stages(self.precision_plugin, self.module, self._parts.ownership, self.groups, known)
        agree_on_overflow(self.precision_plugin, self.groups, voted)

    def _put_first(self, trainer: Any, callback: EpochCallback) -> None:
        others = (c for c in trainer.callbacks if not isinstance(c, EpochCallback))  # a second fit has the first's
        trainer.callbacks = [callback, *others]

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around ``configure_model``: what it builds on ``meta`` gets its initial values when it is cut."""
        with self._initialisation.recording():
            yield

    def _plan_stages(self, trainer: Trainer) -> plan.Plan:
        """A module is cut once: each rank has let go of the other stages when it runs again."""
        if self._plan is None or self._plan[0] is not self.module:
            planning = Planning(
                trainer, self._total_stages, self.partition, self.blocks, self.num_micro_batches, self.root_device
            )
            self._plan = self.module, plan_on_rank_zero(planning)
        return self._plan[1]

    def _cut(self, trainer: Trainer) -> None:
        """Cuts the module: this rank keeps its stage, in flat buckets, equal on all pipelines."""
        runs = Options(
            self.num_stages,
            self.schedule,
            self.stages_per_worker,
            self.num_micro_batches,
            self.dynamic_shapes,
            self.delays,
            self._run_timeout,
        )
        stages = self._plan_stages(trainer)
        self._gathers = is_whole(self.module) if self.gather_module is None else self.gather_module
        self._assembled = assemble(self.module, stages, self.groups, runs, self._initialisation, self.root_device)
        parts = self._assembled
        if self._unmark is not None:
            self._unmark()
        self._unmark = mark_parts(self.module)
        self._checkpoints = Checkpoints(self.module, parts.ownership, self.groups, self.save_distributed_checkpoint)
        changing, client = parts.freezing, self.membership.client
        stops, scaled = self.on_nonfinite == "stop", getattr(self.precision_plugin, "scaler", None) is not None
        where = f"stage {self._worker.stage} of pipeline {self._worker.pipeline}"
        self._watch = Watch(where, changing.buckets, self.root_device, losses=not scaled) if stops else None
        self._sync = self._method.build(
            Replica(
                client,
                self.groups,
                changing.buckets,
                parts.buffers,
                changing.trained,
                self._run_timeout,
                stops and not scaled,
            )
        )

    def setup_optimizers(self, trainer: Trainer) -> None:
        with refuse_several_optimizers():
            super().setup_optimizers(trainer)
        (optimizer,) = self.optimizers
        refuse_repeated_evaluation(optimizer)
        if self.num_stages > 1:
            refuse_own_unscaling(optimizer, self.precision_plugin)
        if self.variance_correction and is_adam_family(optimizer):
            models = self._sync.models_averaged
            self.optimizers = [VarianceCorrection(optimizer, num_workers=models)]
            if models == 1:
                rank_zero_info(f"variance_correction=True has nothing to correct: {self.sync} averages no models here.")
        elif self.variance_correction:
            rank_zero_info(
                f"variance_correction=True does not apply to {type(optimizer).__name__}: not of Adam's family."
            )
        self._checkpoints.take_part_of(self.optimizers[0])

    def model_to_device(self) -> None:
        """Nothing: :func:`keep_only` has moved this stage's part, and the rest stays on ``meta``."""

    # -------------------------------------------------------------------- data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every stage of a pipeline sees the same batches. For prediction, whole batches are dealt out later."""
        if self.module.trainer.predicting:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.mesh.num_pipelines, "rank": self._worker.pipeline}

    @property
    def reads_inputs(self) -> bool:
        """Whether this worker runs the first blocks. A data module whose inputs go to those alone may leave them unread
        elsewhere, and give :func:`~lightning_sdpipe.pipeline.data.stand_in` of their shape."""
        return self.mesh.locate(self.global_rank)[0] == 0

    def process_dataloader(self, dataloader: Any) -> PipelineLoader:
        if self.module.trainer.predicting:
            deal_batches(dataloader, self.groups)
        loader = PipelineLoader(dataloader, self._worker.pipeline, self._seed_of_epoch)
        if self._trainer.training:
            loader.compare(self.groups, self.root_device)
        return loader

    def _seed_of_epoch(self) -> tuple[int, ...]:
        return self._data_seed, self._worker.pipeline, self.module.trainer.current_epoch

    # ------------------------------------------------------------------- steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._parts.freezing.changed():
            self._pause()
            with self._first_failure():
                self._parts.freezing.take_over()
            self._sync.resume()
        if self._absent:
            return
        if self._mini_batches == 0:
            check_equal(batch, self.groups)
            if hasattr(self.module, "split_batch"):
                parts = split(batch, self.num_micro_batches, self.module)
                check_equal_split([part.signature for part in parts], self.groups)
        self._sync.resume()

    def training_step(self, batch: Any, *arguments: Any) -> Tensor:
        if self._absent:  # what hooks see is the loss of the batch before
            return self._last_loss.to(self.root_device, copy=True).requires_grad_()
        with self._step("training_step"), self._parts.freezing.refused():
            scale = loss_scale(self.precision_plugin, self.root_device)
            generation = self._parts.freezing.generation
            context = self.precision_plugin.train_step_context
            step = Step("training_step", arguments, context, self._draws.stream, scale, generation)
            exchange = self._sync.gradients if self._update_follows else None
            ready = partial(self._readiness.reached, "backward")
            loss = self._parts.pipeline.train(batch, step, self._mini_batches, exchange, self._accumulated, ready)
        self._last_loss = loss.detach()
        if self._watch is not None and self.has_results:
            self._watch.loss(self._last_loss, self._mini_batches)
        self._mini_batches += 1
        self._accumulated = not self._update_follows
        return loss

    def _announce(self) -> None:
        self._sync.resume()  # if the user's step has communicated
        self._sync.announce(self._updates)

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
        if isinstance(self._parts.pipeline, PipeDreamPipeline) and self._parts.pipeline.filling:
            return closure()
        if self._absent and not self._takes_a_step_alone():
            self._updates += 1
            return closure()
        before = self._mini_batches
        output = self._update(optimizer, closure, model, self._absent, **kwargs)
        if self._mini_batches == before and not self._absent:
            raise ConfigurationError(STEPPED_ALONE)
        return output

    def _update(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, alone: bool = False, **kwargs: Any
    ) -> Any:
        """Steps with the gradients that ``closure`` puts in place, and synchronises the outcome unless ``alone``."""
        self._update_follows = True
        self._readiness.expect()
        try:
            output = super().optimizer_step(optimizer, once(closure, optimizer), model, **kwargs)
            if not alone:
                self._readiness.reached("step")
        finally:
            self._update_follows = False
            self._readiness.drop()
        if self._watch is not None:
            self._watch.parameters(self._updates)
        self._updates += 1
        if not alone:
            with self._first_failure():
                if self._sync.shares_next:
                    self._look()
                self._sync.synchronise()
            self.membership.client.step_ended(self._updates - 1, self._sync.statistics.seconds_waiting)
        return output

    def on_train_start(self) -> None:
        refuse_new_parameters(self.module, self._parts.ownership)
        self._mini_batches = self._updates = 0
        self._accumulated = False

    def _pause(self) -> None:
        """Finishes what is in the pipeline and makes all replicas equal."""
        self._empty_pipeline()
        with self._first_failure():
            self._settle()
            self._look()
            self._sync.pause(lockstep.position(self._trainer))

    def _look(self) -> None:
        """Before others may get this worker's model."""
        if self._watch is not None:
            self._watch.check()

    def _empty_pipeline(self) -> None:
        if isinstance(self._parts.pipeline, PipeDreamPipeline):
            with torch.inference_mode(False), torch.enable_grad(), self._first_failure():
                while self._parts.pipeline.draining:
                    self._update(self.optimizers[0], self._drain)
                self._settle()

    def _sit_out(self, position: int) -> Meeting:
        """There is no batch to train until the others come together somewhere."""
        self._empty_pipeline()
        with self._first_failure():
            self._look()
            return self._sync.sit_out(position)

    def _takes_a_step_alone(self) -> bool:
        """Has this pipeline gradients to apply although it has no batch, and may its model be another one?"""
        accumulated, self._accumulated = self._accumulated, False
        return accumulated and self._sync.gradients is None

    def _come_together(self) -> None:
        """Before anything that waits for other pipelines: who waits there must not be waited for in the scheduler."""
        if self._whereabouts.in_step and isinstance(self._trainer.fit_loop._data_fetcher, MeetingFetcher):
            raise ConfigurationError(
                "The training step communicates with other pipelines, and a pipeline that has fewer batches than they "
                "would not take part. Use a map-style dataset of equal shards (as Lightning's own sampler makes them)."
            )
        if self._assembled is not None and not self._sync.together:
            if not self._whereabouts.in_step:
                self._empty_pipeline()
            with self._first_failure():
                self._look()
                self._sync.come_together(lockstep.position(self._trainer))

    @property
    def _absent(self) -> bool:
        """Has this pipeline nothing to train in this turn of the loop?"""
        fetcher = self._trainer.fit_loop._data_fetcher
        return isinstance(fetcher, MeetingFetcher) and fetcher.absent

    def _drain(self) -> Tensor:
        assert isinstance(self._parts.pipeline, PipeDreamPipeline)
        loss = self._parts.pipeline.drain(self._sync.gradients, partial(self._readiness.reached, "backward"))
        self.optimizers[0].zero_grad()
        return self.backward(loss, self.optimizers[0])

    def validation_step(self, batch: Any, *arguments: Any) -> Any:
        return self._evaluate("validation_step", batch, arguments, self.precision_plugin.val_step_context)

    def test_step(self, batch: Any, *arguments: Any) -> Any:
        return self._evaluate("test_step", batch, arguments, self.precision_plugin.test_step_context)

    def predict_step(self, batch: Any, *arguments: Any) -> Any:
        return self._evaluate("predict_step", batch, arguments, self.precision_plugin.predict_step_context)

    def on_validation_end(self) -> None:
        self._settle()

    on_test_end = on_validation_end

    def on_predict_end(self) -> None:
        self._settle()
        loop = self.module.trainer.predict_loop
        if loop.return_predictions and loop._combined_loader is not None:
            collect(loop._predictions, loop._combined_loader.flattened, self.groups)

    def _evaluate(self, name: str, batch: Any, arguments: tuple[Any, ...], context: Any) -> Any:
        with self._step(name):
            step = Step(name, arguments, context, self._draws.stream)
            return [runner.evaluate(batch, step) for runner in self._parts.runners][-1]

    def _settle(self) -> None:
        self._parts.pipeline.settle()

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        with self._whereabouts.running(name), self._first_failure():
            yield

    @property
    def has_results(self) -> bool:
        """Whether this worker's stage is the last one, where steps come to their end and what they return exists."""
        return self._worker.stage == self.num_stages - 1

    # -------------------------------------------------------------- collectives

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduces over the replicas of this stage. Within a step nothing is reduced: no pipeline waits for another
        there, and logged values are reduced at the end of the epoch."""
        if self._whereabouts.in_step or self._update_follows:
            return tensor
        self._come_together()
        group = group or self.groups.stage
        with self._first_failure(), waiting_for(group, "reducing"):
            return super().reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._whereabouts.check("reduce_boolean_decision")
        self._come_together()
        votes = torch.tensor(int(decision), device=self.root_device)
        with self._waiting("a decision"):
            dist.all_reduce(votes)
        return int(votes) == self.world_size if all else bool(votes)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers one tensor from each pipeline, of the replicas of this stage.

        ``LightningModule.all_gather`` asks for all ranks by default; other stages may not come to where this one asks.
        """
        group = self.groups.stage if group in (None, dist.group.WORLD) else group
        if sync_grads and dist.get_backend(group) == "gloo":  # torch.distributed.nn scatters by global rank
            raise ConfigurationError("all_gather(sync_grads=True) needs NCCL; on gloo, torch cannot do it in a group.")
        self._come_together()
        with self._first_failure(), waiting_for(group, "all_gather"):
            return super().all_gather(tensor, group, sync_grads)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._whereabouts.check("barrier")
        self._come_together()
        with self._waiting("a barrier"):
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        self._whereabouts.check("broadcast")
        self._come_together()
        with self._waiting("a broadcast"):
            return super().broadcast(obj, src)

    @contextmanager
    def _waiting(self, purpose: str) -> Iterator[None]:
        """Around what all ranks do together; before others have been started there is nobody to wait for."""
        if self._groups is None:
            yield
        else:
            with self._first_failure(), waiting_for(self.groups.everybody, purpose):
                yield

    # -------------------------------------------------------------- checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeFiles()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = WholeFiles()  # unless it has one
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._assembled is None:  # other processes have run, and this one has the whole module
            return self.module.state_dict()
        if self._membership is not None:  # else the run is over, and nothing under way
            self._whereabouts.check("save_checkpoint")
            self._pause()
        return self._checkpoints.module_state()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._data_seed = checkpoint.get("random_states", {}).get("data_seed", self._data_seed)
        self._checkpoints.load_module(checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpoints.optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        finetuning.restore_groups(self._trainer, self.optimizers[0])
        self._checkpoints.load_optimizer(self.optimizers[0], checkpoint["optimizer_states"][0])

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._assembled is not None and self._checkpoints.distributed:
            self._checkpoints.save(checkpoint, Path(filepath), self.checkpoint_io)
        elif self.is_global_zero and is_distributed(filepath):  # a file would be moved into that directory
            with replacing(Path(filepath)):
                super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if is_distributed(checkpoint_path):
            return self._checkpoints.load(Path(checkpoint_path), self.checkpoint_io)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self._checkpoints.wait()
        super().remove_checkpoint(filepath)

    def _random_states(self) -> dict[str, Any]:
        return {"data_seed": self._data_seed, **random_states.gather(self.groups)}

    # ---------------------------------------------------------------- the end

    @property
    def statistics(self) -> SyncStatistics:
        """How this worker's synchronisation went: group sizes and seconds spent."""
        return self._sync.statistics

    @property
    def seconds_waiting_for_pipeline(self) -> float:
        """What this worker stood still for the neighbouring stages of its pipeline, validation included."""
        return sum(runner.link.seconds_waiting for runner in self._parts.runners)

    @property
    def injector(self) -> DelayInjector:
        """How long this worker computed, and how long it was made to sleep by ``delays``."""
        return self._parts.delays

    def _first_failure(self) -> AbstractContextManager[None]:
        if self._membership is None:  # the run is over
            return nullcontext()
        return self._membership.first_failure(lambda: self._trainer.received_sigterm)

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):  # else the process would end as if all were well
            exception.code = 128 + signal.SIGTERM
        self._failed = True
        if self._assembled is not None:
            self._sync.abandon()
        if self._membership is not None:
            self._membership.fail(exception)
        if isinstance(self._launcher, CheckingLauncher):
            job.at_end(self._launcher.end_children, _GRACE)  # after the error has been printed

    def _give_up(self) -> None:
        """Ends a wait for a tensor that will never come: with its sender if this process has to run on."""
        if hydra_job.in_sweep() and isinstance(self._launcher, CheckingLauncher) and self._launcher.procs:
            self._launcher.end_children(0)
        else:
            os._exit(1)

    def teardown(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = ()
        if self._assembled is not None:
            self._checkpoints.wait()
            self._assembled.cut_model.restore()
            to_cpu(self.module)
            self._assembled.freezing.buckets.clear()  # memory that only they hold
            if self._gathers and not self._failed:
                self._make_whole(self._assembled)
        if self._membership is not None:
            self._membership.close()
            self._membership = None
        module, self._lightning_module = self._lightning_module, None
        super().teardown()  # moves the whole module to the CPU if it finds one; meta tensors cannot be moved
        self._lightning_module = module

    def _make_whole(self, parts: Assembled) -> None:
        """As other strategies leave the module: whole, in all processes that go on."""
        ends_here = self._start_method != "popen"  # all but one process of each machine
        keepers = [rank for rank in range(self.world_size) if not ends_here or rank % self.num_processes == 0]
        if set(keepers) & set(self.mesh.pipeline_ranks(self._worker.pipeline)):
            with self._first_failure():
                make_whole(self.module, parts.ownership, self.groups, self.global_rank in keepers)
        if self.global_rank in keepers and self._unmark is not None:
            self._unmark()

    # ----------------------------------------------------------------- narrowing

    @property
    def module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self.module.trainer

    @property
    def groups(self) -> ProcessGroups:
        assert self._groups is not None, "setup_environment opens the groups"
        return self._groups

    @property
    def membership(self) -> Membership:
        assert self._membership is not None, "setup_environment connects to the scheduler"
        return self._membership

    @property
    def _parts(self) -> Assembled:
        assert self._assembled is not None, "setup assembles the pipeline"
        return self._assembled

    @property
    def _total_stages(self) -> int:
        return self.num_stages * self.stages_per_worker

    @property
    def _worker(self) -> Worker:
        return Worker(*self.groups.mesh.locate(self.groups.rank))

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: the package registers ``"sdpipe"`` when it is imported, not this class's parents' names."""
