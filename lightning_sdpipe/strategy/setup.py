"""Setup of a worker for one run of a Trainer: the objects that the strategy's hooks call, and the adaptation of
Lightning's loop, callbacks and module to them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, SpikeDetection, ThroughputMonitor
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.checkpoints.distributed import directory_of
from lightning_sdpipe.checkpoints.whole_module import make_whole, tie_again, to_cpu
from lightning_sdpipe.checkpoints.worker import Checkpoints
from lightning_sdpipe.errors import ConfigurationError, counted
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.loop import loop
from lightning_sdpipe.loop.batch_source import BatchSource, ShardBatchSource, Split
from lightning_sdpipe.loop.dealt import SourceInputs
from lightning_sdpipe.loop.epoch_callback import EpochCallback, StreamSwitches, agree, agree_in_evaluations
from lightning_sdpipe.loop.finetuning import adapt_finetuning
from lightning_sdpipe.loop.joint import JointBatchSource, OwnPart
from lightning_sdpipe.loop.loop import ClockChecks
from lightning_sdpipe.loop.optimizers import OptimizerProgress, refuse_unlike_options
from lightning_sdpipe.loop.precision import adapt_precision, current_scale, scaler_of
from lightning_sdpipe.loop.python_state import PythonState
from lightning_sdpipe.loop.refusals import leave_out_example, refuse_own_values, takes_iterator
from lightning_sdpipe.loop.user_hooks import (
    gather_metrics_over,
    leave_results_to_the_last_stage,
    refuse_metrics_elsewhere,
    show_whole_groups,
)
from lightning_sdpipe.loop.weight_averaging import averaging_of, tensors_in
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.partition.chain import described
from lightning_sdpipe.partition.ownership import assign_owners, parameters_held, saves_nothing
from lightning_sdpipe.partition.plan import Plan
from lightning_sdpipe.pipeline.data import shared
from lightning_sdpipe.pipeline.stage_runner import CollectiveGuard
from lightning_sdpipe.sync.methods import deals
from lightning_sdpipe.sync.rendezvous import Rendezvous
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer, TrainingState
from lightning_sdpipe.worker.assembly import Assembled
from lightning_sdpipe.worker.options import Options
from lightning_sdpipe.worker.run import TrainingRun
from lightning_sdpipe.worker.training import FirstFailure, NonfiniteWatch, StateByHand, Training

_SHOWN = 4  # ranks of a stage that are shown when the run begins


@dataclass
class Origin:
    """Where training begins: at the first batch, or where the run that wrote a checkpoint was."""

    data_seed: int
    saved: Mapping[str, Any] = field(default_factory=dict)
    """The loaded checkpoint's random states and counts of updates and rounds."""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Begin where the run that ``saved`` these values was."""
        self.saved = saved
        self.data_seed = saved.get("data_seed", self.data_seed)


@dataclass
class Setup:
    """The parts of one worker in one run of a Trainer. :meth:`prepare` makes what the strategy's hooks call.

    Args:
        strategy: knows the Trainer's module, devices and plugins.
        options: the strategy's resolved options.
        run: the run that this worker belongs to.
        parts: its stage of the module, its links and its pipeline.
        origin: where training begins; a checkpoint that is loaded later changes it.
        gathers: whether the processes that continue after the run get the whole module back.
        guard: is told which of the user's steps and hooks is running.
        first_failure: context for waits for other workers.
    """

    strategy: DDPStrategy
    options: Options
    run: TrainingRun
    parts: Assembled
    origin: Origin
    gathers: bool
    guard: CollectiveGuard
    first_failure: FirstFailure
    training: Training | None = None
    """What this worker does in each turn of the loop, once it is prepared."""
    source: BatchSource | None = None
    """Source of the batches that this worker trains; None in runs that do not fit."""
    split: Split | None = None
    """Split of the training data among pipelines, once Lightning has made the loader."""
    complete: bool = False
    """True once this object is prepared and the optimizers exist."""
    compared: bool = False
    """True once this run's pipelines have compared their training data."""
    begun: set[str] = field(default_factory=set)
    """Paths of checkpoints that exist or are being written in the background."""
    undo: list[Callable[[], object]] = field(default_factory=list)
    """Functions that restore the module and callbacks, called in order before
    :func:`~lightning_sdpipe.loop.loop.change_back` restores the rest."""

    def __post_init__(self) -> None:
        assert self.strategy.lightning_module is not None
        self.module: LightningModule = self.strategy.lightning_module
        self.trainer: Trainer = self.module.trainer
        self.groups, held = self.run.groups, self.parts.ownership
        self.checkpoints = Checkpoints(self.module, held, self.groups, self.options.save_distributed_checkpoint)
        self.state = PythonState(
            self.trainer, held, self.groups, self.strategy.root_device, self.first_failure, self.parts.changed_late
        )
        self._fits = self.trainer.state.fn == TrainerFn.FITTING
        self._scales = scaler_of(self.strategy.precision_plugin) is not None
        self._callbacks: Sequence[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]

    def prepare(
        self, from_leader: Callable[[list[float]], list[float]], random_states: Callable[[], dict[str, Any]]
    ) -> None:
        """Make the objects that the strategy's hooks call, and adapt Lightning's loop and callbacks to them.

        Args:
            from_leader: returns the numbers that the first rank of the leading pipeline gives; every worker must call
                it.
            random_states: returns all that a resumed run needs to continue; every worker must call it.
        """
        seed = partial(getattr, self.origin, "data_seed")  # which calls no Python
        draws = StreamSwitches(self.trainer, self.parts.cut_model.streams, seed, self.groups, self.parts.ownership)
        self.undo.append(draws.undo)
        self._count_pipelines()
        replica = self._make_replica()
        self._average_weights(replica)
        training = self.training = self._make_training(replica, draws)
        self.begin_where_it_ended()
        if self.options.total_stages > 1 or self.options.cuts:
            pipeline, sections = self.parts.pipeline, self.parts.sections
            adapt_precision(self.trainer, self.parts.ownership, self.groups, pipeline, training.ready, sections)
        self.undo += self._adapt_hooks()[::-1]  # several may have changed the same hook
        refuse_own_values(self.trainer, self._why_alike(training.sync))
        agree_in_evaluations(self.trainer, self.groups, self.first_failure)
        self._know_names()
        checks = ClockChecks(loop.clocks(self.trainer), from_leader)
        if self._fits:
            self.source = draws.source = self._make_source(training, checks)
            self.undo.append(self.source.close)
        loop.change(self.trainer, training, checks, self.source)
        share, meet, loaded = self.run.share, self._meet_at_the_end, self.origin.saved or None
        shared = EpochCallback(self.groups, training, share, random_states, checks, draws, meet, loaded)
        self.state.make_alike()
        shared.put_first(self.trainer)
        self.undo.append(partial(shared.take_out, self.trainer))

    def _count_pipelines(self) -> None:
        """Let Lightning's monitors of throughput count the batches of all pipelines."""
        depths = self.options.depths if self.options.cuts else [self.options.num_stages]
        for callback in self._callbacks:
            if isinstance(callback, ThroughputMonitor):
                pipelines = self.run.mesh.num_pipelines
                lightning_internals.count_pipelines(callback, pipelines, sum(depths) / len(depths))

    def _make_replica(self) -> Replica:
        buckets, precision = self.parts.freezing.buckets, self.strategy.precision_plugin
        progress: TrainingState = OptimizerProgress(lambda: self.strategy.optimizers, precision, buckets)
        if not self.module.automatic_optimization:
            progress = StateByHand(progress, self._begun_training)
        watch = self._stops_at_nonfinite() and not self._scales
        return self.run.replica(self.parts, watch, self._scale_of_gradients, progress)

    def _stops_at_nonfinite(self) -> bool:
        """Return whether numbers that are not finite end the run. Lightning's callback decides that by itself."""
        return self.options.on_nonfinite == "stop" and not self._detects_spikes

    @property
    def _detects_spikes(self) -> bool:
        return any(isinstance(callback, SpikeDetection) for callback in self._callbacks)

    def _begun_training(self) -> Training:
        assert self.training is not None
        return self.training

    def _scale_of_gradients(self) -> float:
        """Return the scale of gradients during an exchange: 1 without a flush, where they have been divided by the loss
        scale."""
        return current_scale(self.strategy.precision_plugin) if self.parts.pipeline.flushes else 1.0

    def _average_weights(self, replica: Replica) -> None:
        """Connect callbacks that average the weights over time, so that their averages are made equal when the weights
        are."""
        if not self._fits:
            return
        if (averaging := averaging_of(self._callbacks)) is not None:
            averaging.connect(self.checkpoints, replica.averages)
        for callback in self._callbacks:
            if (average := lightning_internals.average_model(callback)) is not None:
                replica.averages.extend(tensor.detach() for tensor in tensors_in(average))

    def _make_training(self, replica: Replica, draws: StreamSwitches) -> Training:
        assert self.run.membership is not None, "setup_environment connects to the scheduler"
        sync = self.run.options.method.build(replica)
        if self._fits and not self.module.automatic_optimization:
            self._refuse_by_hand(sync)
        watch = None
        if self._stops_at_nonfinite():
            stage, pipeline = self.groups.mesh.locate(self.groups.rank)
            where, buckets = f"stage {stage} of pipeline {pipeline}", self.parts.freezing.buckets
            watch = NonfiniteWatch(where, buckets, self.strategy.root_device, losses=not self._scales)
        return Training(
            trainer=self.trainer,
            parts=self.parts,
            sync=sync,
            rendezvous=Rendezvous(sync),
            client=self.run.membership.client,
            groups=self.groups,
            draws=draws,
            guard=self.guard,
            watch=watch,
            first_failure=self.first_failure,
            state=self.state if self.parts.changed_late else None,
        )

    def _refuse_by_hand(self, sync: Synchronizer) -> None:
        """Raise ConfigurationError for options that do not go with manual optimization, whose steps may run any number
        of backwards."""
        options, name = self.options, type(self.module).__name__
        asked = {
            f"num_micro_batches={options.num_micro_batches}": options.num_micro_batches > 1,
            "batch_by_speed=True": options.batch_by_speed,
            f"exchange={options.exchange}, whose momenta are those of one update,": options.exchange.payload.momentum,
        }
        for what, given in asked.items():
            if given:
                raise ConfigurationError(
                    f"{what} does not go with the manual optimization of {name}, whose step gets the whole batch and "
                    "may run several backwards. Leave it out; data='dealt', with a method that averages models, lets "
                    "pipelines train at speeds of their own."
                )
        if not sync.takes_several_backwards:
            sync.begin_backward(0, 1)  # says why

    def _adapt_hooks(self) -> list[Callable[[], None]]:
        """Adapt the hooks of the module and of callbacks, and their metrics, to this stage. Return functions that undo
        it."""
        module, callbacks, guard, groups = self.module, self._callbacks, self.guard, self.groups
        is_last, is_cut = groups.mesh.is_last(groups.rank), groups.mesh.num_stages > 1

        def held() -> list[Tensor]:
            return [bucket.buffer for bucket in self.parts.freezing.buckets]

        lock_step, guarded = self.parts.lock_step, partial(guard.result_hook, parameters=held)

        def together() -> bool:
            return lock_step is not None and lock_step.together

        if lock_step is not None:
            lock_step.on_entry, lock_step.first_failure = self._meet_in_a_call, self.first_failure
        undo = [
            leave_results_to_the_last_stage(module, callbacks, is_last, guarded, together, self.state.hand_on),
            gather_metrics_over(module, callbacks, groups.stage, lambda: not is_last and guard.in_step),
        ]
        if is_cut:
            undo.append(adapt_finetuning(callbacks, self.checkpoints.whole_groups))
            undo.append(leave_out_example(module))
            undo.append(show_whole_groups(module, callbacks, self.checkpoints.whole_groups_shown))
        if not is_last:
            undo.append(refuse_metrics_elsewhere(module, callbacks, self.parts.logged_late))
        return undo

    def _why_alike(self, sync: Synchronizer) -> str | None:
        """Return why no worker may have a learning rate of its own; None if pipelines may."""
        if sync.gradients is not None and self.run.mesh.num_pipelines > 1:
            return f"replicas stay equal under sync={self.options.sync!r}"
        return "stages other than the last have none" if self.options.num_stages > 1 else None

    def _know_names(self) -> None:
        """Make each checkpoint callback treat a name as taken while another one is still writing it, and refuse
        directories that cannot hold a distributed checkpoint."""
        callbacks: list[Any] = [each for each in self.trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]

        def knowing(callback: Any) -> Callable[..., bool]:
            def file_exists(filepath: Any, trainer: Trainer) -> bool:
                return str(filepath) in self.begun or type(callback).file_exists(callback, filepath, trainer)

            return file_exists

        for callback in callbacks:
            if self.checkpoints.distributed and callback.dirpath is not None:
                directory_of(callback.dirpath)
            callback.file_exists = knowing(callback)

    def _make_source(self, training: Training, checks: ClockChecks) -> BatchSource:
        options, run, origin = self.options, self.run, self.origin
        loaded: Callable[[], Split | None] = lambda: origin.saved.get("split")  # noqa: E731
        if options.batch_by_speed and options.job is None:
            own = OwnPart(self.trainer, run.groups, self.parts.delays, options.division)
            return JointBatchSource(self.trainer, run.groups, own, lambda: origin.data_seed, loaded)
        method, asked = run.options.method, options.data == "dealt"
        if not deals(options.data, method, run.mesh.num_pipelines, training.client.policy):
            return ShardBatchSource(self.trainer, training, loaded)
        reason = None if asked or not self.guard.communicates else "a step communicates with other pipelines"
        if takes_iterator(self.module):
            reason = "training_step takes batches from dataloader_iter itself"
        elif self._detects_spikes:
            reason = "SpikeDetection asks all pipelines after each batch"
        inputs = SourceInputs(
            trainer=self.trainer,
            turns=training,
            client=training.client,
            groups=run.groups,
            checks=checks,
            run=shared(secrets.randbits(62)),
            seed=lambda: origin.data_seed,
            origin=loaded,
            required=asked,
            on_any_worker=partial(self.strategy.reduce_boolean_decision, all=False),
            reason=reason,
        )
        return run.dealt_batches(training, self.checkpoints, inputs)

    # ---------------------------------------------------------------- during the run

    def begin_where_it_ended(self) -> None:
        """Let training begin at the update that the run of the loaded checkpoint had reached."""
        assert self.training is not None
        self.training.begin_at(self.origin.saved.get("updates", 0))
        rounds: list[int] | None = self.origin.saved.get("rounds")
        if rounds and self.training.sync.rounds is not None:
            mesh = self.groups.mesh
            stage, _ = mesh.locate(self.groups.rank)  # the lowest, if the model was cut differently
            self.training.sync.rounds = rounds[stage] if len(rounds) == mesh.num_stages else min(rounds)

    def counted(self) -> dict[str, Any]:
        """Return the numbers that a resumed run continues from; rounds are due by the number of updates."""
        assert self.training is not None
        return {"data_seed": self.origin.data_seed, "split": self.split, "updates": self.training.updates}

    def rounds_by_stage(self) -> dict[str, list[int]]:
        """Gather the number of rounds of each stage, if the method counts them; every rank must call it."""
        assert self.training is not None
        if self.training.sync.rounds is None:
            return {}
        groups = self.groups
        stage, _ = groups.mesh.locate(groups.rank)
        rounds = torch.zeros(groups.mesh.num_stages, dtype=torch.int64, device=self.strategy.root_device)
        rounds[stage] = self.training.sync.rounds
        with waiting_for(groups.world, "gathering how many rounds there were"):
            dist.all_reduce(rounds, dist.ReduceOp.MAX)
        return {"rounds": rounds.tolist()}

    def _meet_in_a_call(self, block: str) -> None:
        """Bring all stages together at a call of ``block`` outside of training, or refuse the call."""
        if self.parts.pipeline.flushes:  # else a neighbour takes what was sent to it for its next batch's
            self.parts.pipeline.settle()
        if self.guard.ends_evaluation and self.state.call_others():
            return
        if not self.guard.in_step:
            self.guard.check(f"block {block!r}")

    def _meet_at_the_end(self, hook: str) -> None:
        """Agree with other workers on what ``hook``, at the end of an epoch, finds."""
        assert self.training is not None
        if hook == "on_train_epoch_end":
            self.parts.freezing.refuse_new_parameters()
            with self.first_failure:
                agree(self.trainer, self.groups)
                if (same := self.training.sync.same_gradients) is not None:
                    refuse_unlike_options(self.strategy.optimizers, same)
        self.state.hand_on_metrics(hook)

    # ---------------------------------------------------------------- description

    def what_runs(self, plans: Sequence[Plan], scheduler: str) -> str:
        """Describe what each rank runs and how, so that users can check that the run is the one they meant. ``plans``
        has one plan for each pipeline, or one for all; ``scheduler`` is the scheduler's address."""
        options, mesh = self.options, self.run.mesh
        assert self.source is not None
        if mesh.alike:
            lines = [f"SDPipe: pipelines × stages = {mesh.num_pipelines} × {len(plans[0].spans)}"]
            lines += self._stages(plans[0], mesh.ranks, "")
        else:
            lines = [f"SDPipe: {mesh.num_pipelines} pipelines of {', '.join(map(str, options.depths))} stages"]
            for pipeline, row in zip(mesh.pipelines, mesh.ranks, strict=True):
                lines += self._stages(plans[pipeline], [row], f"pipeline {pipeline}, ")
        lines += [
            f"schedule: {options.schedule}, {counted(options.num_micro_batches, 'micro-batch')} of a mini-batch",
            f"method: {options.sync!r}",
            f"exchange: {'in full precision' if options.exchange == Exchange() else repr(options.exchange)}",
            f"data: {self.source.description}",
            f"scheduler: {self._where_to_look(scheduler)}",
        ]
        return "\n  ".join(lines)

    def _stages(self, plan: Plan, ranks: Sequence[Sequence[int]], name: str) -> Iterator[str]:
        module, memory = self.module, self.parts.ownership.memory
        ownership = assign_owners(module, plan.chain, plan.module_spans, readers=plan.readers, memory=memory)
        for stage, span in enumerate(plan.spans):
            parameters = parameters_held(module, ownership, stage)
            where = [self._named(row[stage % len(row)]) for row in ranks]
            shown = ", ".join(where[:_SHOWN]) + (f" and {len(where) - _SHOWN} more" if len(where) > _SHOWN else "")
            blocks = described(plan.blocks[span.start : span.stop])
            yield f"{name}stage {stage}: {blocks}, {parameters:,} parameters, on {shown}"
        if saves := saves_nothing(module, ownership):
            yield saves

    def _named(self, rank: int) -> str:
        devices, nodes = self.strategy.parallel_devices or [self.strategy.root_device], self.strategy.num_nodes
        if self.options.depths and nodes > 1:  # machines may have unlike numbers of devices
            return f"rank {rank}"
        node = f" of node {rank // len(devices)}" if nodes > 1 else ""
        return f"rank {rank} ({devices[rank % len(devices)]}{node})"

    def _where_to_look(self, address: str) -> str:
        if self.options.standing_scheduler is not None:
            return f"see `sdpipe status {address}`"
        where, log = "" if self.strategy.num_nodes == 1 else " on its machine", self.options.scheduler_log
        kept = "log_dir=… keeps its decisions" if log is None else f"its log is {log}"
        return f"{address}, started by rank 0: see `sdpipe status`{where}; {kept}"

    # ---------------------------------------------------------------- the end

    def take_apart(self, failed: bool, keepers: Sequence[int]) -> None:
        """Give the user's module back as other strategies leave it, once the last checkpoint is written.

        Args:
            failed: whether the run failed. Tensors may then be in use, and other workers gone, so nothing is moved or
                gathered.
            keepers: ranks of the processes that continue, which get the whole module.
        """
        self.checkpoints.wait()
        self.parts.cut_model.restore()
        if not failed:
            to_cpu(self.module)
        self.parts.freezing.buckets.clear()  # memory that only they hold
        groups = self.groups
        _, pipeline = groups.mesh.locate(groups.rank)
        if self.gathers and not failed and set(keepers) & set(self.run.mesh.pipeline_ranks(pipeline)):
            with self.first_failure:
                make_whole(self.module, self.parts.ownership, groups, groups.rank in keepers)
        tie_again(self.module, self.parts.ownership)
