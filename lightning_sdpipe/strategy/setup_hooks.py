"""Lightning's hooks before a run: how its processes start, and what each of them makes for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.checkpoints.whole_module import is_whole
from lightning_sdpipe.checkpoints.worker import Checkpoints
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.loop import loop
from lightning_sdpipe.loop.adaptation import adapt
from lightning_sdpipe.loop.batch_source import BatchSource, ShardBatchSource
from lightning_sdpipe.loop.dealt import Dealing
from lightning_sdpipe.loop.epoch_callback import EpochCallback
from lightning_sdpipe.loop.joint import JointBatchSource
from lightning_sdpipe.loop.loop import ClockChecks
from lightning_sdpipe.loop.loss_scale import current_scale
from lightning_sdpipe.loop.nonfinite import NonfiniteWatch
from lightning_sdpipe.loop.optimizers import OptimizerProgress, corrected, refuse_unfit, refuse_unfit_momentum
from lightning_sdpipe.loop.planning import Planning, plan_on_rank_zero
from lightning_sdpipe.loop.python_state import PythonState
from lightning_sdpipe.loop.refusals import (
    refuse_own_values,
    refuse_several_optimizers,
    refuse_small_batches,
    refuse_uninitialised,
    refuse_unsupported,
)
from lightning_sdpipe.loop.resume_position import Split
from lightning_sdpipe.loop.stream_switches import StreamSwitches
from lightning_sdpipe.loop.weight_averaging import averaging_of
from lightning_sdpipe.partition import plan
from lightning_sdpipe.partition.chain import described
from lightning_sdpipe.partition.materialise import Initialisation
from lightning_sdpipe.partition.same_memory import same_memory
from lightning_sdpipe.pipeline.data import shared_seed
from lightning_sdpipe.strategy.checkpoint_hooks import CheckpointHooks
from lightning_sdpipe.sync.methods import deals
from lightning_sdpipe.topology.groups import backends, prepare_world
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.worker.assembly import assemble
from lightning_sdpipe.worker.launching.environment import naming_the_port
from lightning_sdpipe.worker.launching.launcher import launcher_for
from lightning_sdpipe.worker.training import Training

_SHOWN = 4  # of a stage's ranks, when the run begins


class SetupHooks(CheckpointHooks):
    """Starts the processes, cuts the model, and makes what the hooks of a run call."""

    _plans: tuple[nn.Module, Sequence[plan.Plan]] | None = None
    """Of each pipeline, or one that all have."""
    _undo: Sequence[Callable[[], None]] = ()
    _failed = _gathers = False

    @cached_property
    def _initialisation(self) -> Initialisation:
        return Initialisation()

    # ------------------------------------------------------------------ launch

    @property
    def mesh(self) -> Mesh:
        """The ranks of all workers. Where devices are placed, they are known once the ranks have met."""
        return self._run.mesh

    def _configure_launcher(self) -> None:
        self._run.check()
        timeout = self.options.run_timeout.total_seconds()
        launcher = launcher_for(self, self.options.start_method, self._check_module, timeout)
        lightning_internals.set_launcher(self, launcher)

    def _check_module(self, trainer: Trainer, train_loader: Any) -> None:
        module, options = self.lightning_module, self.options
        if module is None:
            return
        refuse_unsupported(trainer, options.total_stages > 1)
        self._refuse_averaging(trainer)
        if not options.batch_by_speed:
            refuse_small_batches(module, train_loader, options.num_micro_batches)
        if not any(is_overridden(hook, module) for hook in ("setup", "configure_model")):  # else the model is not there
            plan.check(module, options.blocks, options.all_cuts)

    def _refuse_averaging(self, trainer: Trainer) -> None:
        if self.options.cuts and averaging_of(trainer.callbacks) is not None:  # type: ignore[attr-defined]
            raise ConfigurationError(
                "SDPipeWeightAveraging needs pipelines of one depth and cut, and those of "
                f"num_stages={list(self.options.depths)} are unlike: leave it out, or give one number of stages."
            )

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
        refuse_unsupported(trainer, self.options.total_stages > 1)
        self._refuse_averaging(trainer)
        self._run.check_trainer(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._cut(trainer)
        self._prepare_training(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._data_seed = self._run.set_out(trainer, self._data_seed)
        if trainer.state.fn == TrainerFn.FITTING:
            rank_zero_info(self._what_runs())

    def _what_runs(self) -> str:
        """What a user looks at when a run is not what was meant: what each rank runs, and how."""
        options, ranks = self.options, self.mesh.ranks
        assert self._plans is not None
        devices = self.parallel_devices or [self.root_device]

        def worker(rank: int) -> str:
            if options.cuts and self.num_nodes > 1:  # machines may have unlike numbers of devices
                return f"rank {rank}"
            node = f" of node {rank // len(devices)}" if self.num_nodes > 1 else ""
            return f"rank {rank} ({devices[rank % len(devices)]}{node})"

        def stages_of(stages: plan.Plan, rows: Sequence[Sequence[int]], name: str) -> Iterator[str]:
            for stage, span in enumerate(stages.spans):
                blocks = stages.blocks[span.start : span.stop]
                parameters = sum(plan.num_parameters(self.module, block) for block in blocks)
                where = [worker(row[stage % len(row)]) for row in rows]
                shown = ", ".join(where[:_SHOWN]) + (f" and {len(where) - _SHOWN} more" if len(where) > _SHOWN else "")
                yield f"{name}stage {stage}: {described(blocks)}, {parameters:,} parameters, on {shown}"

        if self.mesh.alike:
            (stages,) = self._plans[1]
            lines = [f"SDPipe: pipelines × stages = {self.mesh.num_pipelines} × {len(stages.spans)}"]
            lines += stages_of(stages, ranks, "")
        else:
            lines = [f"SDPipe: {self.mesh.num_pipelines} pipelines of {', '.join(map(str, self.mesh.depths))} stages"]
            for pipeline, (stages, row) in enumerate(zip(self._plans[1], ranks, strict=True)):
                lines += stages_of(stages, [row], f"pipeline {pipeline}, ")
        lines += [
            f"schedule: {options.schedule}, {options.num_micro_batches} micro-batches of a mini-batch",
            f"method: {options.sync!r}",
            f"exchange: {'in full precision' if options.exchange == Exchange() else repr(options.exchange)}",
            f"data: {self._batches.description}",
            f"scheduler: {self._where_to_look()}",
        ]
        return "\n  ".join(lines)

    def _where_to_look(self) -> str:
        address, options = self.membership.client.address, self.options
        if options.standing_scheduler is not None:
            return f"see `sdpipe status {address}`"
        where = "" if self.num_nodes == 1 else " on its machine"
        log = (
            "log_dir=… keeps its decisions" if options.scheduler_log is None else f"its log is {options.scheduler_log}"
        )
        return f"{address}, started by rank 0: see `sdpipe status`{where}; {log}"

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around ``configure_model``: what it builds on ``meta`` gets its initial values when it is cut."""
        with self._initialisation.recording():
            yield

    def _plan_stages(self, trainer: Trainer) -> Sequence[plan.Plan]:
        """A module is cut once: each rank has let go of the other stages when it runs again."""
        if self._plans is None or self._plans[0] is not self.module:
            options = self.options
            planning = Planning(
                trainer,
                options.all_cuts,
                options.blocks,
                options.num_micro_batches,
                self.root_device,
                self._whereabouts,
                options.run_timeout.total_seconds(),
            )
            self._plans = self.module, plan_on_rank_zero(planning)
        return self._plans[1]

    def _cut(self, trainer: Trainer) -> None:
        """Cuts the module: this rank keeps its stage, in flat buckets, equal on all pipelines."""
        refuse_uninitialised(self.module)
        memory = same_memory(self.module)
        stages = self._plan_stages(trainer)
        self._gathers = is_whole(self.module) if self.options.gather_module is None else self.options.gather_module
        self._assembled = assemble(
            self.module, stages, self.groups, self.options, self._initialisation, self.root_device, memory
        )
        ownership = self._assembled.ownership
        self._checkpoints = Checkpoints(self.module, ownership, self.groups, self.options.save_distributed_checkpoint)
        if trainer.state.fn == TrainerFn.FITTING and trainer.checkpoint_callbacks:
            self._checkpoints.check()

    def _prepare_training(self, trainer: Trainer) -> None:
        """Makes what the hooks below call, and Lightning's loop and callbacks fit for it."""
        parts = self._parts
        scaled = getattr(self.precision_plugin, "scaler", None) is not None
        watch = self.options.on_nonfinite == "stop"
        where = f"stage {self._worker.stage} of pipeline {self._worker.pipeline}"
        draws = StreamSwitches(
            trainer, parts.cut_model.streams, self._seed, self.groups, parts.ownership, self._position
        )
        buckets = parts.freezing.buckets
        progress = OptimizerProgress(lambda: self.optimizers, self.precision_plugin, buckets)
        self._state = PythonState(
            trainer, parts.ownership, self.groups, self.root_device, self._first_failure, parts.changed_late
        )
        replica = self._run.replica(parts, watch and not scaled, self._scale_of_gradients, progress)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ThroughputMonitor):
                stages = self.world_size / self.mesh.num_pipelines if self.options.cuts else self.options.num_stages
                lightning_internals.count_pipelines(callback, self.mesh.num_pipelines, stages)
        averaging = averaging_of(trainer.callbacks)  # type: ignore[attr-defined]
        if averaging is not None and trainer.state.fn == TrainerFn.FITTING:
            averaging.connect(self._checkpoints, replica.averages)
        sync = self._run.options.method.build(replica)
        self._training = Training(
            trainer,
            parts,
            sync,
            self._run.rendezvous(sync),
            self.membership.client,
            self.groups,
            draws,
            self._whereabouts,
            NonfiniteWatch(where, buckets, self.root_device, losses=not scaled) if watch else None,
            self._first_failure,
            self._state if parts.changed_late else None,
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
                self._training.ready,
                lambda: self._checkpoints.whole_groups(self.optimizers[0]),
                lambda: self._checkpoints.whole_groups_shown(self.optimizers),
                self._state.hand_on,
                parts.logged_late,
                parts.sections,
            ),
        ]
        self._undo = [*self._undo, refuse_own_values(trainer, self._why_alike)]
        checks = ClockChecks(loop.clocks(trainer), self.broadcast)
        self._source = self._make_source(trainer, checks) if trainer.state.fn == TrainerFn.FITTING else None
        if self._source is not None:
            self._undo = [*self._undo, self._source.close]
        loop.change(trainer, self._training, checks, self._source)
        shared = EpochCallback(self.groups, self._training, self._run.share, self._random_states, checks, draws)
        shared.put_first(trainer)

    @property
    def _why_alike(self) -> str | None:
        """Why no worker may have a learning rate of its own; None if pipelines may."""
        if self.training.sync.gradients is not None and self.mesh.num_pipelines > 1:
            return f"replicas stay equal under sync={self.options.sync!r}"
        return "stages other than the last have none" if self.options.num_stages > 1 else None

    def _scale_of_gradients(self) -> float:
        """When they are exchanged: without a flush they are divided by the loss scale before."""
        return current_scale(self.precision_plugin) if self._parts.pipeline.flushes else 1.0

    def _make_source(self, trainer: Trainer, checks: ClockChecks) -> BatchSource:
        def origin() -> Split | None:
            return self._loaded_split

        def anybody(mine: bool) -> bool:
            return self.reduce_boolean_decision(mine, all=False)

        if self.options.batch_by_speed:
            return JointBatchSource(
                trainer, self.groups, self._parts.delays, *self.options.division, self._seed, origin
            )
        data, method = self.options.data, self._run.options.method
        if not deals(data, method, self.mesh.num_pipelines, self.membership.client.policy):
            return ShardBatchSource(trainer, self.training)
        asked = data == "dealt"
        in_step = None if asked or not self._whereabouts.communicates else "a step communicates with other pipelines"
        dealing = Dealing(self._seed, origin, asked, anybody, in_step)
        return self._run.dealt_batches(trainer, self.training, self._checkpoints, checks, dealing)

    def setup_optimizers(self, trainer: Trainer) -> None:
        with refuse_several_optimizers():
            super().setup_optimizers(trainer)
        (optimizer,) = self.optimizers
        refuse_unfit(optimizer, self.precision_plugin, self.options.num_stages)
        refuse_unfit_momentum(optimizer, self.options.exchange.payload)
        if self.options.variance_correction:
            self.optimizers = [corrected(optimizer, self.training.sync.models_averaged, self.options.sync)]
        self._checkpoints.take_part_of(self.optimizers[0])

    def model_to_device(self) -> None:
        """Nothing: :func:`keep_only` has moved this stage's part, and the rest stays on ``meta``."""
