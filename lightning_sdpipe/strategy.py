"""The Lightning strategy: its hooks, in the order of a run's life, each a few calls into the packages beside it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdpipe.assembly import Assembled, Options, assemble
from lightning_sdpipe.checkpoints import random_states
from lightning_sdpipe.checkpoints.distributed import is_distributed, replacing
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
from lightning_sdpipe.partition.chain import Block, find_blocks
from lightning_sdpipe.partition.materialise import Initialisation
from lightning_sdpipe.partition.ownership import keep_only
from lightning_sdpipe.pipeline.data import PipelineLoader, check_equal, shared_seed
from lightning_sdpipe.pipeline.fetcher import MeetingFetcher
from lightning_sdpipe.pipeline.pipedream import PipeDreamPipeline
from lightning_sdpipe.pipeline.stage_runner import Step
from lightning_sdpipe.placement.placed import check_shape, mesh_of, placed_blocks, read_placement
from lightning_sdpipe.placement.roll_call import roll_call
from lightning_sdpipe.scheduler.policy import Worker
from lightning_sdpipe.sync import SemiDecentralized
from lightning_sdpipe.sync.meeting import Meeting
from lightning_sdpipe.sync.rendezvous import standing_scheduler
from lightning_sdpipe.sync.synchronizer import Replica, SyncMethod, SyncStatistics
from lightning_sdpipe.trainer import lockstep
from lightning_sdpipe.trainer.appointments import Appointments
from lightning_sdpipe.trainer.clipping import clip_over_stages
from lightning_sdpipe.trainer.epoch_callback import EpochCallback
from lightning_sdpipe.trainer.last_stage import gather_metrics_over, leave_results_to_the_last_stage
from lightning_sdpipe.trainer.loss_scale import agree_on_overflow, loss_scale
from lightning_sdpipe.trainer.measure import measure_on_rank_zero
from lightning_sdpipe.trainer.predictions import collect, deal_batches
from lightning_sdpipe.trainer.refusals import refuse_several_optimizers, refuse_unsupported

Schedule = Literal["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "pipedream"]
_LOOPED = ("interleaved_1f1b", "zero_bubble")

_T = TypeVar("_T")

_GRACE = 10.0  # seconds that other processes get to end by themselves after a failure


class SDPipeStrategy(DDPStrategy):
    """Pipeline and data parallel training on unequal workers (SDPipe, VLDB 2023).

    ``devices × num_nodes`` workers form N pipelines of ``num_stages`` stages. Each stage runs its part of the user's
    own steps; the replicas of a stage keep together as ``sync`` says, by default by averaging parameters in groups.

    Args:
        num_stages: M, the stages of a pipeline; must divide the number of workers.
        sync: the synchronisation method, from :mod:`lightning_sdpipe.sync`; SDPipe's by default.
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
        delays: what slows workers down while they train, to study stragglers; from
            :mod:`lightning_sdpipe.heterogeneity`.
        scheduler: address of a scheduler that runs already (``sdpipe scheduler``), whose policy then holds instead of
            that of ``sync``; the environment variable ``SDPIPE_SCHEDULER`` by default. Else rank 0 starts one.
        scheduler_key_file: the workers' keys for it, as ``sdpipe keygen`` made them; ``SDPIPE_KEY_FILE`` by default.
        variance_correction: correct the second moments of an optimizer of the Adam family for the averaging of models
            (:class:`~lightning_sdpipe.optim.VarianceCorrection`), by the number of pipelines.
        dynamic_shapes: a block's output shape may differ between batches of equal shapes.
        save_distributed_checkpoint: every rank writes its own part of a checkpoint, a directory then, instead of rank 0
            all of a file; with ``"async"`` in the background.
        timeout: how long any transfer or answer may take before the run ends with an error.
        **kwargs: as for :class:`~lightning.pytorch.strategies.DDPStrategy`, for example ``start_method`` or
            ``process_group_backend``.

    Raises:
        ConfigurationError: at the first moment at which something is known not to work.
    """

    def __init__(
        self,
        num_stages: int = 1,
        sync: SyncMethod | None = None,
        schedule: Schedule = "1f1b",
        stages_per_worker: int = 2,
        num_micro_batches: int | None = None,
        partition: plan.Partition | Literal["placed"] = "uniform",
        blocks: Sequence[str] | None = None,
        placement: str | Path | None = None,
        delays: Heterogeneity | None = None,
        scheduler: str | None = None,
        scheduler_key_file: str | Path | None = None,
        variance_correction: bool = False,
        dynamic_shapes: bool = False,
        save_distributed_checkpoint: bool | Literal["async"] = False,
        timeout: timedelta = timedelta(minutes=30),
        **kwargs: Any,
    ) -> None:
        super().__init__(timeout=timeout, **kwargs)
        if num_micro_batches is not None and num_micro_batches < 1:
            raise ConfigurationError(f"num_micro_batches={num_micro_batches} is not allowed; use 1 or more.")
        self.num_stages = num_stages
        self.sync: SyncMethod = sync if sync is not None else SemiDecentralized()
        if not isinstance(self.sync, SyncMethod):
            raise ConfigurationError(f"sync={sync!r} is no synchronisation method; use one of lightning_sdpipe.sync.")
        if schedule not in get_args(Schedule):
            raise ConfigurationError(f"schedule={schedule!r} is not known; use one of {list(get_args(Schedule))}.")
        if schedule in _LOOPED and (num_stages < 2 or stages_per_worker < 2):
            raise ConfigurationError(
                f"schedule={schedule!r} needs num_stages and stages_per_worker of 2 or more; given {num_stages} and "
                f"{stages_per_worker}."
            )
        self.schedule = schedule
        self.stages_per_worker = stages_per_worker if schedule in _LOOPED else 1
        self.num_micro_batches = num_micro_batches or num_stages
        self.placement = None if placement is None else read_placement(placement)
        self._placed: Mesh | None = None
        self.partition = placed_blocks(self.placement) if partition == "placed" else partition
        self._in_flight: plan.InFlight | None = None
        if isinstance(partition, plan.Balanced) and partition.memory is not None:
            self._in_flight = plan.in_flight(schedule, num_stages, self.num_micro_batches)
        self.blocks = blocks
        self.delays: Heterogeneity = delays if delays is not None else Delays()
        self._standing_scheduler = standing_scheduler(scheduler, scheduler_key_file)
        self.variance_correction = variance_correction
        self.dynamic_shapes = dynamic_shapes
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self._run_timeout = timeout
        self._groups: ProcessGroups | None = None
        self._membership: Membership | None = None
        self._assembled: Assembled | None = None
        self._undo: Sequence[Callable[[], None]] = ()
        self._initialisation = Initialisation()
        self._plan: tuple[nn.Module, plan.Plan] | None = None
        self._in_step = False
        self._update_follows = False
        self._accumulated = False  # gradients of earlier mini-batches wait for the next update
        self._mini_batches = self._updates = 0

    # ------------------------------------------------------------------ launch

    @property
    def mesh(self) -> Mesh:
        """Who is which worker. Where devices are placed, that is known once the ranks have met."""
        if self._placed is not None:
            return self._placed
        if self.placement is not None:
            check_shape(self.placement, self.num_stages, self.num_nodes * self.num_processes)
        return Mesh.build(self.num_nodes * self.num_processes, self.num_stages)

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        job.begin()
        _ = self.mesh  # refuses a number of workers that does not fit
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
            plan.check(len(find_blocks(module, self.blocks)), self._total_stages, self.partition)

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
            if self.placement is not None:
                self._placed = mesh_of(self.placement, roll_call(self.local_rank, self.root_device))
            self._groups = ProcessGroups.open(self.mesh, self._run_timeout)
        self._data_seed = shared_seed()
        self._membership = Membership(
            self.mesh,
            self.sync.policy,
            self._standing_scheduler,
            self._bind,
            self._run_timeout.total_seconds(),
            self._give_up,
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
        self.accelerator.setup(trainer)
        refuse_unsupported(trainer, self.schedule, self.num_stages)
        self.model = self.precision_plugin.convert_module(self.model)
        self._cut(trainer)
        appointments = Appointments(lockstep.clocks(trainer), self.broadcast)
        lockstep.release(trainer, self._sync, self._sit_out, appointments)
        self._put_first(trainer, EpochCallback(self.groups, self._pause, self._random_states, appointments))
        self._adapt(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _adapt(self, trainer: Any) -> None:
        """Makes what Lightning, torchmetrics and the precision plugin do per rank right for a stage of a pipeline."""
        is_last = self._worker.stage == self.num_stages - 1
        self._undo = [
            leave_results_to_the_last_stage(self.module, trainer.callbacks, is_last),
            gather_metrics_over(self.module, self.groups.stage),
        ]
        clip_over_stages(self.precision_plugin, self.module, self._parts.ownership, self.groups)
        agree_on_overflow(self.precision_plugin, self.groups)

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
            without_data = trainer.state.fn != TrainerFn.FITTING and plan.is_measured(self.partition)
            partition = "parameters" if without_data else self.partition

            def measure(blocks: Sequence[Block]) -> plan.Profile:
                context = self.precision_plugin.train_step_context
                return measure_on_rank_zero(trainer, blocks, self.num_micro_batches, self.root_device, context)

            stages = plan.plan(self.module, self._total_stages, partition, self.blocks, measure, self._in_flight)
            self._plan = self.module, stages
        return self._plan[1]

    def _cut(self, trainer: Trainer) -> None:
        """Cuts the module: this rank keeps its stage, in flat buckets, equal on all pipelines."""
        options = Options(
            self.num_stages,
            self.schedule,
            self.stages_per_worker,
            self.num_micro_batches,
            self.dynamic_shapes,
            self.delays,
            self._run_timeout,
        )
        stages = self._plan_stages(trainer)
        self._assembled = assemble(self.module, stages, self.groups, options, self._initialisation, self.root_device)
        parts = self._assembled
        self._checkpoints = Checkpoints(self.module, parts.ownership, self.groups, self.save_distributed_checkpoint)
        self._sync = self.sync.build(
            Replica(self.membership.client, self.groups, parts.buckets, parts.buffers, parts.trained, self._run_timeout)
        )

    def setup_optimizers(self, trainer: Trainer) -> None:
        with refuse_several_optimizers():
            super().setup_optimizers(trainer)
        (optimizer,) = self.optimizers
        self._checkpoints.take_part_of(optimizer)
        if self.variance_correction and is_adam_family(optimizer):
            models = self._sync.models_averaged
            self.optimizers = [VarianceCorrection(optimizer, num_workers=models)]
            if models == 1:
                rank_zero_info(f"variance_correction=True has nothing to correct: {self.sync} averages no models here.")
        elif self.variance_correction:
            rank_zero_info(
                f"variance_correction=True does not apply to {type(optimizer).__name__}: not of Adam's family."
            )

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
        if self._absent:
            return
        if self._mini_batches == 0:
            check_equal(batch, self.groups)
        self._sync.resume()

    def training_step(self, batch: Any, *arguments: Any) -> Tensor:
        if self._absent:
            return torch.zeros((), device=self.root_device, requires_grad=True)
        with self._step():
            scale = loss_scale(self.precision_plugin, self.root_device)
            step = Step("training_step", arguments, self.precision_plugin.train_step_context, scale)
            exchange = self._sync.gradients if self._update_follows else None
            announce = self._announce if self._update_follows else lambda: None
            loss = self._parts.pipeline.train(batch, step, self._mini_batches, exchange, self._accumulated, announce)
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
        return self._update(optimizer, closure, model, self._absent, **kwargs)

    def _update(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, alone: bool = False, **kwargs: Any
    ) -> Any:
        """Steps with the gradients that ``closure`` puts in place, and synchronises the outcome unless ``alone``."""
        self._update_follows = True
        try:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._update_follows = False
        self._updates += 1
        if not alone:
            with self._first_failure():
                self._sync.synchronise()
        return output

    def on_train_start(self) -> None:
        self._mini_batches = self._updates = 0
        self._accumulated = False

    def _pause(self) -> None:
        """Finishes what is in the pipeline and makes all replicas equal."""
        self._empty_pipeline()
        with self._first_failure():
            self._sync.pause(lockstep.position(self._trainer))

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
            return self._sync.sit_out(position)

    def _takes_a_step_alone(self) -> bool:
        """Has this pipeline gradients to apply although it has no batch, and may its model be another one?"""
        accumulated, self._accumulated = self._accumulated, False
        return accumulated and self._sync.gradients is None

    def _come_together(self) -> None:
        """Before anything that waits for other pipelines: who waits there must not be waited for in the scheduler."""
        if self._in_step and isinstance(self._trainer.fit_loop._data_fetcher, MeetingFetcher):
            raise ConfigurationError(
                "The training step communicates with other pipelines, and a pipeline that has fewer batches than they "
                "would not take part. Use a map-style dataset of equal shards (as Lightning's own sampler makes them)."
            )
        if self._assembled is not None and not self._sync.together:
            if not self._in_step:
                self._empty_pipeline()
            with self._first_failure():
                self._sync.come_together(lockstep.position(self._trainer))

    @property
    def _absent(self) -> bool:
        """Has this pipeline nothing to train in this turn of the loop?"""
        fetcher = self._trainer.fit_loop._data_fetcher
        return isinstance(fetcher, MeetingFetcher) and fetcher.absent

    def _drain(self) -> Tensor:
        assert isinstance(self._parts.pipeline, PipeDreamPipeline)
        loss = self._parts.pipeline.drain(self._sync.gradients, self._announce)
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
        with self._step():
            step = Step(name, arguments, context)
            return [runner.evaluate(batch, step) for runner in self._parts.runners][-1]

    def _settle(self) -> None:
        for runner in self._parts.runners:
            runner.link.settle()

    @contextmanager
    def _step(self) -> Iterator[None]:
        self._in_step = True
        try:
            with self._first_failure():
                yield
        finally:
            self._in_step = False

    # -------------------------------------------------------------- collectives

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduces over the replicas of this stage. Within a step nothing is reduced: no pipeline waits for another
        there, and logged values are reduced at the end of the epoch."""
        if self._in_step or (self._assembled is not None and self._sync.announced):
            return tensor
        self._come_together()
        return super().reduce(tensor, group or self.groups.stage, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._come_together()
        votes = torch.tensor(int(decision), device=self.root_device)
        with self._first_failure(), waiting_for(self.groups.everybody, "a decision"):
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
        return super().all_gather(tensor, group, sync_grads)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._come_together()
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        self._come_together()
        return super().broadcast(obj, src)

    # -------------------------------------------------------------- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._membership is not None:  # else the run is over, and nothing under way
            self._pause()
        return self._checkpoints.module_state()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._data_seed = checkpoint.get("random_states", {}).get("data_seed", self._data_seed)
        self._checkpoints.load_module(checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpoints.optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.load_optimizer(self.optimizers[0], checkpoint["optimizer_states"][0])

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._checkpoints.distributed:
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
        return self.membership.first_failure(lambda: self._trainer.received_sigterm)

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):  # else the process would end as if all were well
            exception.code = 128 + signal.SIGTERM
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
        if self._assembled is not None:
            self._checkpoints.wait()
            self._assembled.cut_model.restore()
            stage, _ = self.mesh.locate(self.global_rank)
            keep_only(self.module, self._assembled.ownership, stage, torch.device("cpu"))
        if self._membership is not None:
            self._membership.close()
            self._membership = None
        module, self._lightning_module = self._lightning_module, None
        super().teardown()  # moves the whole module to the CPU if it finds one; meta tensors cannot be moved
        self._lightning_module = module

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
