"""The Lightning strategy: its hooks, in the order of a run's life, each a few calls into the packages beside it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.checkpoints.whole_module import is_whole, make_whole, tie_again, to_cpu
from lightning_sdpipe.checkpoints.worker import Checkpoints
from lightning_sdpipe.data.loader import PipelineLoader
from lightning_sdpipe.heterogeneity.injector import DelayInjector
from lightning_sdpipe.loop import loop
from lightning_sdpipe.loop.adaptation import adapt
from lightning_sdpipe.loop.clock import ClockChecks
from lightning_sdpipe.loop.dealt import Dealing, DealtBatchSource
from lightning_sdpipe.loop.epoch_callback import EpochCallback
from lightning_sdpipe.loop.joint import JointBatchSource
from lightning_sdpipe.loop.loss_scale import current_scale
from lightning_sdpipe.loop.nonfinite import NonfiniteWatch
from lightning_sdpipe.loop.optimizers import (
    OptimizerProgress,
    corrected,
    follow,
    refuse_unfit,
    refuse_unfit_momentum,
)
from lightning_sdpipe.loop.planning import Planning, plan_on_rank_zero
from lightning_sdpipe.loop.predictions import collect, deal_batches
from lightning_sdpipe.loop.python_state import PythonState
from lightning_sdpipe.loop.refusals import (
    refuse_new_parameters,
    refuse_own_values,
    refuse_several_optimizers,
    refuse_unsupported,
)
from lightning_sdpipe.loop.resume_position import Split, split_of
from lightning_sdpipe.loop.stream_switches import StreamSwitches
from lightning_sdpipe.partition import plan
from lightning_sdpipe.partition.materialise import Initialisation
from lightning_sdpipe.partition.same_memory import same_memory
from lightning_sdpipe.pipeline.data import shared_seed
from lightning_sdpipe.strategy.checkpoint_hooks import CheckpointHooks
from lightning_sdpipe.sync.methods import deals
from lightning_sdpipe.topology.groups import backends, prepare_world
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.worker.assembly import Assembled, assemble
from lightning_sdpipe.worker.launching.environment import naming_the_port
from lightning_sdpipe.worker.launching.launcher import end_after_failure, launcher_for
from lightning_sdpipe.worker.training import Training


class SDPipeStrategy(CheckpointHooks):
    """Pipeline and data parallel training on unequal workers (SDPipe, VLDB 2023).

    ``devices × num_nodes`` workers form N pipelines of ``num_stages`` stages. Each stage runs its part of the user's
    own steps; the replicas of a stage keep together as ``sync`` says, by default by averaging parameters in groups.
    The arguments are those of :class:`~lightning_sdpipe.strategy.options.SDPipeOptions`.
    """

    _plan: tuple[nn.Module, plan.Plan] | None = None
    _undo: Sequence[Callable[[], None]] = ()
    _failed = _gathers = False
    _turns: DealtBatchSource | JointBatchSource | None = None

    @cached_property
    def _initialisation(self) -> Initialisation:
        return Initialisation()

    # ------------------------------------------------------------------ launch

    @property
    def mesh(self) -> Mesh:
        """Who is which worker. Where devices are placed, that is known once the ranks have met."""
        return self._run.mesh

    def _configure_launcher(self) -> None:
        self._run.check()
        timeout = self._run_timeout.total_seconds()
        launcher = launcher_for(self, lightning_internals.start_method(self), self._check_module, timeout)
        lightning_internals.set_launcher(self, launcher)

    def _check_module(self) -> None:
        module = self.lightning_module
        if module is not None and not is_overridden("configure_model", module):  # else there is no model yet
            plan.check(module, self.blocks, self.total_stages, self.partition, self._in_flight)

    def setup_environment(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        with naming_the_port(environment):
            super().setup_environment()
        prepare_world(self.root_device)
        self._run.open()
        self._data_seed = shared_seed()

    def _get_process_group_backend(self) -> str:
        """Both kinds of tensors travel: headers and metrics are on the CPU."""
        device, default = self.root_device, super()._get_process_group_backend()
        return backends(device, self.parallel_devices or [], self.process_group_backend, default)

    # ------------------------------------------------------------------- setup

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self._failed = False
        self.accelerator.setup(trainer)
        refuse_unsupported(trainer)
        self._run.check_trainer(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._cut(trainer)
        self._prepare_training(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._run.set_out(trainer)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around ``configure_model``: what it builds on ``meta`` gets its initial values when it is cut."""
        with self._initialisation.recording():
            yield

    def _plan_stages(self, trainer: Trainer) -> plan.Plan:
        """A module is cut once: each rank has let go of the other stages when it runs again."""
        if self._plan is None or self._plan[0] is not self.module:
            planning = Planning(
                trainer,
                self.total_stages,
                self.partition,
                self.blocks,
                self.num_micro_batches,
                self.root_device,
                self._whereabouts,
                self._run_timeout.total_seconds(),
                self._in_flight,
            )
            self._plan = self.module, plan_on_rank_zero(planning)
        return self._plan[1]

    def _cut(self, trainer: Trainer) -> None:
        """Cuts the module: this rank keeps its stage, in flat buckets, equal on all pipelines."""
        memory = same_memory(self.module)
        stages = self._plan_stages(trainer)
        self._gathers = is_whole(self.module) if self.gather_module is None else self.gather_module
        self._assembled = assemble(
            self.module, stages, self.groups, self.pipeline_options, self._initialisation, self.root_device, memory
        )
        ownership = self._assembled.ownership
        self._checkpoints = Checkpoints(self.module, ownership, self.groups, self.save_distributed_checkpoint)
        if trainer.state.fn == TrainerFn.FITTING and trainer.checkpoint_callbacks:
            self._checkpoints.check()

    def _prepare_training(self, trainer: Trainer) -> None:
        """Makes what the hooks below call, and Lightning's loop and callbacks fit for it."""
        parts = self._parts
        scaled = getattr(self.precision_plugin, "scaler", None) is not None
        watch = self.on_nonfinite == "stop"
        where = f"stage {self._worker.stage} of pipeline {self._worker.pipeline}"
        draws = StreamSwitches(
            trainer, parts.cut_model.streams, lambda: self._data_seed, self.groups, parts.ownership, self._position
        )
        buckets = parts.freezing.buckets
        progress = OptimizerProgress(lambda: self.optimizers, self.precision_plugin, buckets)
        self._state = PythonState(
            trainer, parts.ownership, self.groups, self.root_device, self._first_failure, parts.changed_late
        )
        self._training = Training(
            trainer,
            parts,
            self._method.build(self._run.replica(parts, watch and not scaled, self._scale_of_gradients, progress)),
            self.membership.client,
            self.groups,
            draws,
            self._whereabouts,
            NonfiniteWatch(where, buckets, self.root_device, losses=not scaled) if watch else None,
            self._first_failure,
            lambda: self._turns.portion if isinstance(self._turns, JointBatchSource) else None,
            self._run.rendezvous,
            self._state,
        )
        self._undo = [
            draws.undo,
            *adapt(
                trainer,
                self.groups,
                parts.ownership,
                parts.pipeline,
                buckets,
                self._whereabouts,
                self._training.readiness,
                lambda: self._checkpoints.whole_groups(self.optimizers[0]),
                lambda: self._checkpoints.whole_groups_shown(self.optimizers),
                self._state.hand_on,
                parts.logged_late,
            ),
        ]
        self._undo = [*self._undo, refuse_own_values(trainer, self._why_alike)]
        checks = ClockChecks(loop.clocks(trainer), self.broadcast)
        self._turns = self._turns_by_speed(trainer, checks) if trainer.state.fn == TrainerFn.FITTING else None
        if self._turns is not None:
            self._undo = [*self._undo, self._turns.close]
        loop.change(trainer, self._training, lambda: self.training.together, checks, self._turns)
        pause, share, underway = self._training.pause, self._run.share, lambda: self.training.underway
        EpochCallback(
            self.groups, pause, share, self._random_states, checks, self._first_failure, underway, draws
        ).put_first(trainer)

    @property
    def _why_alike(self) -> str | None:
        """Why no worker may have a learning rate of its own; None if pipelines may."""
        if self.training.sync.gradients is not None and self.mesh.num_pipelines > 1:
            return f"replicas stay equal under sync={self.sync!r}"
        return "stages other than the last have none" if self.num_stages > 1 else None

    def _scale_of_gradients(self) -> float:
        """When they are exchanged: without a flush they are divided by the loss scale before."""
        return current_scale(self.precision_plugin) if self._parts.pipeline.flushes else 1.0

    def _turns_by_speed(self, trainer: Trainer, checks: ClockChecks) -> DealtBatchSource | JointBatchSource | None:
        def seed() -> int:
            return self._data_seed

        def origin() -> Split | None:
            return self._loaded_split

        def anybody(mine: bool) -> bool:
            return self.reduce_boolean_decision(mine, all=False)

        if self.batch_by_speed:
            return JointBatchSource(trainer, self.groups, self._parts.delays, *self.division, seed, origin)
        if not deals(self.data, self._method, self.mesh.num_pipelines, self.membership.client.policy):
            return None
        asked = self.data == "dealt"
        in_step = None if asked or not self._whereabouts.communicates else "a step communicates with other pipelines"
        return self._run.dealt_turns(trainer, self.training, checks, Dealing(seed, origin, asked, anybody, in_step))

    def setup_optimizers(self, trainer: Trainer) -> None:
        with refuse_several_optimizers():
            super().setup_optimizers(trainer)
        (optimizer,) = self.optimizers
        refuse_unfit(optimizer, self.precision_plugin, self.num_stages)
        refuse_unfit_momentum(optimizer, self.exchange.payload)
        if self.variance_correction:
            self.optimizers = [corrected(optimizer, self.training.sync.models_averaged, self.sync)]
        self._checkpoints.take_part_of(self.optimizers[0])

    def model_to_device(self) -> None:
        """Nothing: :func:`keep_only` has moved this stage's part, and the rest stays on ``meta``."""

    # -------------------------------------------------------------------- data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every stage of a pipeline sees the same batches. For prediction, whole batches are dealt out later."""
        if self.module.trainer.predicting:
            return {"num_replicas": 1, "rank": 0}
        return self._run.sampler if self.module.trainer.training else self._run.evaluation_sampler

    @property
    def reads_inputs(self) -> bool:
        """Whether this worker runs the first blocks. A data module whose inputs go to those alone may leave them unread
        elsewhere, and give :func:`~lightning_sdpipe.pipeline.data.stand_in` of their shape."""
        return self.mesh.locate(self.global_rank)[0] == 0

    def process_dataloader(self, dataloader: Any) -> PipelineLoader:
        if self.module.trainer.predicting:
            deal_batches(dataloader, self.groups)
        loader = PipelineLoader(dataloader, self._worker.pipeline, self.mesh.num_pipelines, self._seed_of_epoch)
        if self._trainer.training:
            loader.compare(self.groups, self.root_device)
            self._split = split_of(loader, self.mesh.num_pipelines)
            if self._turns is not None:
                self._turns.deal(dataloader, self._split)
        return loader

    def _position(self) -> int | None:
        return None if self._turns is None else self._turns.position

    def _seed_of_epoch(self) -> tuple[int, ...]:
        return self._data_seed, self.module.trainer.current_epoch

    # ------------------------------------------------------------------- steps

    def on_train_start(self) -> None:
        refuse_new_parameters(self.module, self._parts.ownership)
        self.training.begin()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.training.begin_batch(batch)

    def training_step(self, batch: Any, *arguments: Any) -> Tensor:
        return self.training.step(batch, arguments)

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
        if self.variance_correction:
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
        """Whether this worker's stage is the last one, where steps come to their end and what they return exists."""
        return self._worker.stage == self.num_stages - 1

    # ---------------------------------------------------------------- the end

    @property
    def injector(self) -> DelayInjector:
        """How long this worker computed, and how long it was made to sleep by ``delays``."""
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
        """As other strategies leave the module: whole, in all processes that go on."""
        ends_here = lightning_internals.start_method(self) != "popen"  # all but one process of each machine
        keepers = [rank for rank in range(self.world_size) if not ends_here or rank % self.num_processes == 0]
        if set(keepers) & set(self.mesh.pipeline_ranks(self._worker.pipeline)):
            with self._first_failure():
                make_whole(self.module, parts.ownership, self.groups, self.global_rank in keepers)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: the package registers ``"sdpipe"`` when it is imported, not this class's parents' names."""
