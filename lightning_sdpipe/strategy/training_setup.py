"""Setup of a worker that has its stage: the objects that a run's hooks call, its optimizer and its batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.loop import loop
from lightning_sdpipe.loop.batch_source import BatchSource, ShardBatchSource, Split
from lightning_sdpipe.loop.dealt import Dealing
from lightning_sdpipe.loop.epoch_callback import EpochCallback, StreamSwitches, agree, agree_in_evaluations
from lightning_sdpipe.loop.freezing import adapt_finetuning, restore_groups
from lightning_sdpipe.loop.joint import JointBatchSource
from lightning_sdpipe.loop.loop import ClockChecks
from lightning_sdpipe.loop.optimizers import (
    OptimizerProgress,
    agree_on_groups,
    corrected,
    refuse_unfit,
    refuse_unfit_momentum,
    refuse_unlike_options,
)
from lightning_sdpipe.loop.precision import NonfiniteWatch, adapt_precision, current_scale
from lightning_sdpipe.loop.python_state import PythonState
from lightning_sdpipe.loop.refusals import (
    leave_out_example,
    refuse_own_values,
    refuse_several_optimizers,
    takes_iterator,
)
from lightning_sdpipe.loop.user_hooks import (
    gather_metrics_over,
    leave_results_to_the_last_stage,
    refuse_metrics_elsewhere,
    show_whole_groups,
)
from lightning_sdpipe.loop.weight_averaging import averaging_of, tensors_in
from lightning_sdpipe.strategy.checkpoint_hooks import CheckpointHooks
from lightning_sdpipe.sync.methods import deals
from lightning_sdpipe.sync.synchronizer import Synchronizer
from lightning_sdpipe.worker.training import Training


class TrainingSetup(CheckpointHooks):
    """Hooks that make a worker ready for a run."""

    _compared = False  # whether this run's pipelines have compared their training data

    def _prepare_training(self, trainer: Trainer) -> None:
        """Make the objects that the strategy's hooks call, and adapt Lightning's loop and callbacks to them."""
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
                depths = self.options.depths if self.options.cuts else [self.options.num_stages]
                stages = sum(depths) / len(depths)
                lightning_internals.count_pipelines(callback, self.mesh.num_pipelines, stages)
        averaging = averaging_of(trainer.callbacks)  # type: ignore[attr-defined]
        if averaging is not None and trainer.state.fn == TrainerFn.FITTING:
            averaging.connect(self._checkpoints, replica.averages)
        if trainer.state.fn == TrainerFn.FITTING:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if (average := lightning_internals.average_model(callback)) is not None:
                    replica.averages.extend(tensor.detach() for tensor in tensors_in(average))
        sync = self._run.options.method.build(replica)
        if trainer.state.fn == TrainerFn.FITTING and not self.module.automatic_optimization:
            self._refuse_by_hand(sync)
        self._training = Training(
            trainer,
            parts,
            sync,
            self._run.rendezvous(sync),
            self.membership.client,
            self.groups,
            draws,
            self._guard,
            NonfiniteWatch(where, buckets, self.root_device, losses=not scaled) if watch else None,
            self._first_failure,
            self._state if parts.changed_late else None,
        )
        self._begin_where_it_ended()
        if self.options.total_stages > 1 or self.options.cuts:
            adapt_precision(trainer, parts.ownership, self.groups, parts.pipeline, self._training.ready, parts.sections)
        self._undo = [
            *self._undo,
            draws.undo,
            *self._adapt_hooks(trainer)[::-1],  # several may have changed the same hook
            refuse_own_values(trainer, self._why_alike),
            agree_in_evaluations(trainer, self.groups, self._first_failure),
            self._know_names(trainer),
        ]
        checks = ClockChecks(loop.clocks(trainer), self._from_leader)
        self._source = self._make_source(trainer, checks) if trainer.state.fn == TrainerFn.FITTING else None
        if self._source is not None:
            self._undo = [*self._undo, self._source.close]
        loop.change(trainer, self._training, checks, self._source)
        turns, meet = self._training, self._meet_at_the_end
        loaded = self._resumed or None
        shared = EpochCallback(self.groups, turns, self._run.share, self._random_states, checks, draws, meet, loaded)
        self._state.make_alike()
        shared.put_first(trainer)
        self._undo = [*self._undo, partial(shared.take_out, trainer), partial(loop.change_back, trainer)]

    def _refuse_by_hand(self, sync: Synchronizer) -> None:
        """Raise ConfigurationError for options that manual optimization does not go with, whose steps may run any
        number of backwards."""
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

    def _adapt_hooks(self, trainer: Trainer) -> list[Callable[[], None]]:
        """Adapt the hooks of the module and of callbacks, and their metrics, to this stage. Return functions that undo
        it."""
        module, guard, parts, mesh = self.module, self._guard, self._parts, self.groups.mesh
        callbacks: Sequence[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        is_last, is_cut = mesh.is_last(self.groups.rank), mesh.num_stages > 1

        def held() -> list[Tensor]:
            return [bucket.buffer for bucket in parts.freezing.buckets]

        undo = [
            leave_results_to_the_last_stage(
                module, callbacks, is_last, partial(guard.result_hook, parameters=held), self._state.hand_on
            ),
            gather_metrics_over(module, callbacks, self.groups.stage, lambda: not is_last and guard.in_step),
        ]
        if is_cut:
            undo.append(
                adapt_finetuning(callbacks, lambda number: self._checkpoints.whole_groups(self.optimizers[number]))
            )
            undo.append(leave_out_example(module))
            undo.append(show_whole_groups(module, callbacks, self._checkpoints.whole_groups_shown))
        if not is_last:
            undo.append(refuse_metrics_elsewhere(module, callbacks, parts.logged_late))
        return undo

    def _meet_at_the_end(self, hook: str) -> None:
        """Agree with other workers on what ``hook`` finds, which ends an epoch."""
        if hook == "on_train_epoch_end":
            self._parts.freezing.refuse_new_parameters()
            with self._first_failure:
                agree(self._trainer, self.groups)
                if (same := self.training.sync.same_gradients) is not None:
                    refuse_unlike_options(self.optimizers, same)
        self._state.hand_on_metrics(hook)

    @property
    def _why_alike(self) -> str | None:
        """Reason why no worker may have a learning rate of its own; None if pipelines may."""
        if self.training.sync.gradients is not None and self.mesh.num_pipelines > 1:
            return f"replicas stay equal under sync={self.options.sync!r}"
        return "stages other than the last have none" if self.options.num_stages > 1 else None

    def _scale_of_gradients(self) -> float:
        """Return the scale of gradients during an exchange: without a flush they are divided by the loss scale
        before."""
        return current_scale(self.precision_plugin) if self._parts.pipeline.flushes else 1.0

    def _from_leader(self, numbers: list[float]) -> list[float]:
        with self._together("the leader's clock"):
            return self._run.from_leader(numbers)

    def _make_source(self, trainer: Trainer, checks: ClockChecks) -> BatchSource:
        def origin() -> Split | None:
            return self._loaded_split

        def on_any_worker(mine: bool) -> bool:
            return self.reduce_boolean_decision(mine, all=False)

        if self.options.batch_by_speed and self.options.job is None:
            return JointBatchSource(
                trainer, self.groups, self._parts.delays, *self.options.division, self._seed, origin
            )
        data, method = self.options.data, self._run.options.method
        if not deals(data, method, self.mesh.num_pipelines, self.membership.client.policy):
            return ShardBatchSource(trainer, self.training, origin)
        asked = data == "dealt"
        reason = None if asked or not self._guard.communicates else "a step communicates with other pipelines"
        if takes_iterator(self.module):
            reason = "training_step takes batches from dataloader_iter itself"
        dealing = Dealing(self._seed, origin, asked, on_any_worker, reason)
        return self._run.dealt_batches(trainer, self.training, self._checkpoints, checks, dealing)

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
        self._checkpoints.take_part_of(self.optimizers)
        restore_groups(trainer, self.optimizers)
