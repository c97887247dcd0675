"""Lightning's hooks before a run: starting the processes, and keeping each one's stage of the module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.checkpoints.agreement import agree_on
from lightning_sdpipe.checkpoints.whole_module import is_whole
from lightning_sdpipe.checkpoints.worker import Checkpoints
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.loop.planning import Planning, memory_of, plan_on_rank_zero
from lightning_sdpipe.loop.refusals import refuse_small_batches, refuse_uninitialised, refuse_unsupported
from lightning_sdpipe.loop.weight_averaging import averaging_of
from lightning_sdpipe.partition import plan
from lightning_sdpipe.partition.chain import described
from lightning_sdpipe.partition.materialise import Initialisation
from lightning_sdpipe.partition.ownership import assign_owners, parameters_held, saves_nothing
from lightning_sdpipe.partition.pipeline_cut import PipelineCut
from lightning_sdpipe.partition.same_memory import same_memory
from lightning_sdpipe.pipeline.data import shared_seed
from lightning_sdpipe.strategy.training_setup import TrainingSetup
from lightning_sdpipe.topology.groups import backends, prepare_world
from lightning_sdpipe.worker.assembly import assemble
from lightning_sdpipe.worker.launching.environment import naming_the_port
from lightning_sdpipe.worker.launching.launcher import launcher_for

_SHOWN = 4  # ranks of a stage that are shown when the run begins


class SetupHooks(TrainingSetup):
    """Hooks that start the processes, and cut the model."""

    _plans: tuple[nn.Module, Sequence[plan.Plan]] | None = None
    """Plan of each pipeline, or one that all have."""
    _failed = _gathers = False

    @cached_property
    def _initialisation(self) -> Initialisation:
        return Initialisation()

    # ------------------------------------------------------------------ launch

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
        refuse_unsupported(trainer, options.total_stages > 1)
        self._refuse_averaging(trainer)
        if not options.batch_by_speed:
            refuse_small_batches(module, given.get("train_dataloaders"), options.num_micro_batches)
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
        self._is_set_up, self._restores_late, self._resumed, self._loaded_split = False, None, {}, None
        lightning_internals.resume_from(self._trainer, partial(agree_on, groups=self.groups))

    def _get_process_group_backend(self) -> str:
        """Return backends for both kinds of tensors that travel: headers and metrics are on the CPU."""
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
        self._is_set_up = True
        self.setup_precision_plugin()
        self._data_seed = self._run.set_out(trainer, self._data_seed)
        if trainer.state.fn == TrainerFn.FITTING:
            rank_zero_info(self._what_runs())

    def _what_runs(self) -> str:
        """Describe what each rank runs, and how: what a user looks at when a run is not what was meant."""
        options, ranks = self.options, self.mesh.ranks
        assert self._plans is not None
        devices = self.parallel_devices or [self.root_device]

        def worker(rank: int) -> str:
            if options.depths and self.num_nodes > 1:  # machines may have unlike numbers of devices
                return f"rank {rank}"
            node = f" of node {rank // len(devices)}" if self.num_nodes > 1 else ""
            return f"rank {rank} ({devices[rank % len(devices)]}{node})"

        def stages_of(stages: plan.Plan, rows: Sequence[Sequence[int]], name: str) -> Iterator[str]:
            memory = self._parts.ownership.memory
            ownership = assign_owners(
                self.module, stages.chain, stages.module_spans, readers=stages.readers, memory=memory
            )
            for stage, span in enumerate(stages.spans):
                blocks = stages.blocks[span.start : span.stop]
                parameters = parameters_held(self.module, ownership, stage)
                where = [worker(row[stage % len(row)]) for row in rows]
                shown = ", ".join(where[:_SHOWN]) + (f" and {len(where) - _SHOWN} more" if len(where) > _SHOWN else "")
                yield f"{name}stage {stage}: {described(blocks)}, {parameters:,} parameters, on {shown}"
            if saves := saves_nothing(self.module, ownership):
                yield saves

        if self.mesh.alike:
            (stages,) = self._plans[1]
            lines = [f"SDPipe: pipelines × stages = {self.mesh.num_pipelines} × {len(stages.spans)}"]
            lines += stages_of(stages, ranks, "")
        else:
            lines = [f"SDPipe: {self.mesh.num_pipelines} pipelines of {', '.join(map(str, options.depths))} stages"]
            for pipeline, row in zip(self.mesh.pipelines, ranks, strict=True):
                lines += stages_of(self._plans[1][pipeline], [row], f"pipeline {pipeline}, ")
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
        """Record what ``configure_model`` builds on ``meta``, so that it gets its initial values when it is cut."""
        with self._initialisation.recording():
            yield

    def _plan_stages(self, trainer: Trainer) -> Sequence[plan.Plan]:
        """Return the plans of a module, which is cut once: each rank has let go of the other stages when it runs
        again."""
        if self._plans is None or self._plans[0] is not self.module:
            options = self.options

            def made(cuts: Sequence[PipelineCut]) -> Sequence[plan.Plan]:
                planning = Planning(
                    trainer,
                    cuts,
                    options.blocks,
                    options.num_micro_batches,
                    self.root_device,
                    self._guard,
                    options.run_timeout.total_seconds(),
                    memory_of(self.root_device, len(self.parallel_devices or [self.root_device])),
                )
                return plan_on_rank_zero(planning)

            fits = trainer.state.fn == TrainerFn.FITTING
            self._plans = self.module, self.membership.plan(options.all_cuts, made) if fits else made(options.all_cuts)
        return self._plans[1]

    def _cut(self, trainer: Trainer) -> None:
        """Cut the module: this rank keeps its stage, in flat buckets, equal on all pipelines."""
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

    def model_to_device(self) -> None:
        """No-op: :func:`keep_only` has moved this stage's part, and the rest stays on ``meta``."""
