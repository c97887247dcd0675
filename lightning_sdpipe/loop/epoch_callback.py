"""Work of every worker around the hooks of the user: random streams begin, and at the end of an epoch, or before a
checkpoint is saved, replicas and metrics are made equal.

What steps draw belongs to the batch, and differs between pipelines (:mod:`lightning_sdpipe.random_streams`). What is
drawn between steps, by hooks and by anything that they call, comes from streams that are equal on all workers, so that
what is equal in all pipelines stays so. An optimizer draws from one for each stage, which updates other parameters.

Where an epoch ends, Lightning reduces the logged values one by one, in the order in which they were logged. A pipeline
that has logged others, such as the loss of each class in a batch, would be at another value, and unrelated numbers
would be reduced together. So the replicas of a stage agree on them first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, Self
from zlib import crc32

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage

from lightning_sdpipe import p2p
from lightning_sdpipe.checkpoints import random_states
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.lightning_internals import (
    Method,
    current,
    evaluation_loop,
    of_its_class,
    replace,
    restore,
    steps_between_saves,
)
from lightning_sdpipe.lightning_results import adopt_metrics, expect_values, values_to_reduce
from lightning_sdpipe.loop import loop
from lightning_sdpipe.loop.batch_source import BatchSource, Turns
from lightning_sdpipe.loop.loop import ClockChecks
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.random_streams import RandomStreams, mixed
from lightning_sdpipe.topology.groups import ProcessGroups

_BEFORE_THE_STEP = -2  # in the place of a micro-batch's number
_BETWEEN_STEPS = -1
_KINDS = {stage.value: number for number, stage in enumerate(RunningStage)}


class Point(IntEnum):
    """Points at which a random stream that is equal on all workers begins."""

    BATCH_START = 0
    STEP_ENDED = 1
    UPDATE = 2
    UPDATED = 3
    BATCH_END = 4


class StreamSwitches:
    """Switches random streams with the batches of ``trainer``'s loops until :meth:`undo`.

    Args:
        trainer: about to run.
        streams: of this worker.
        seed: of the run; equal on all workers, and kept in checkpoints.
        groups: this worker's place. Batch k of pipeline i, of N, is number k N + i of the epoch.
        ownership: which stage holds what.
    """

    def __init__(
        self,
        trainer: Trainer,
        streams: RandomStreams,
        seed: Callable[[], int],
        groups: ProcessGroups,
        ownership: Ownership,
    ) -> None:
        self._trainer: Any = trainer
        self._streams = streams
        self._seed = seed
        self.source: BatchSource | None = None
        """Source of training batches, which knows the number of one that was dealt."""
        self._stage, self._pipeline = groups.mesh.locate(groups.rank)
        self._num_pipelines = groups.mesh.num_pipelines
        self._alike = groups.mesh.alike
        self.stream: tuple[int, ...] = ()
        """Numbers that name the streams of the current batch."""
        self._common = mixed(_BETWEEN_STEPS)  # state of the seeds of those between steps, around that batch
        self._updates = 0  # since that batch came
        self._module = trainer.lightning_module
        self._shared = [name for owners, name in ownership.shared_parameters(self._module) if self._stage in owners]
        self._original = current(self._module, Method.BEFORE_TRANSFER)
        replace(self._module, Method.BEFORE_TRANSFER, self._begin)
        self._precision = trainer.precision_plugin
        self._after_closure = current(self._precision, Method.AFTER_CLOSURE)
        replace(self._precision, Method.AFTER_CLOSURE, self._end_closure)

    def undo(self) -> None:
        """Leave the module and the precision plugin as they were."""
        restore(self._module, Method.BEFORE_TRANSFER)
        restore(self._precision, Method.AFTER_CLOSURE)

    def between_steps(self, point: Point) -> None:
        """Begin a stream that is the same on all workers that are at this batch."""
        updates = self._updates if point is Point.UPDATED else 0  # stages may have made other ones
        self._streams.begin(point, updates, state=self._common)

    def between_batches(self, hook: str) -> None:
        """Begin the stream of ``hook``, which runs on all workers, at the same number of batches."""
        batches = self._trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self._streams.begin(self._seed(), self._trainer.current_epoch, batches, crc32(hook.encode()))

    def end_update(self, optimizer: object) -> None:
        """Begin the stream that follows an optimizer's step.

        Raises:
            ConfigurationError: the optimizer has drawn random numbers for parameters that several stages hold, or where
                stages have no replicas that draw alike.
        """
        if (self._shared or not self._alike) and self._streams.drawn_from():
            if not self._alike:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} draws random numbers in its step, and pipelines of unlike cuts would "
                    "draw others for the same parameter and come apart. Use an optimizer that draws none, or pipelines "
                    "of one depth and cut."
                )
            trained = [name for name in self._shared if self._module.get_parameter(name).requires_grad]
            if trained:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} draws random numbers in its step, and {trained[0]!r} is held by "
                    "several stages, whose copies would come apart. Use an optimizer that draws none, or num_stages=1."
                )
        self._updates += 1
        self.between_steps(Point.UPDATED)

    def go_on(self, optimizer: object) -> None:
        """Switch to another stream of the batch after an optimizer has stepped within its training step."""
        self.end_update(optimizer)
        self._streams.begin(*self.stream, 0, self._updates)

    def _end_closure(self, model: Any, optimizer: Any) -> None:
        """Begin the stream of the optimizer's step, after the hooks of the backward and clipping."""
        self._after_closure(model, optimizer)
        self._streams.begin(Point.UPDATE, self._updates, self._stage, state=self._common)

    def _begin(self, batch: Any, dataloader_idx: int = 0) -> Any:
        self.begin_batch(dataloader_idx)
        return self._original(batch, dataloader_idx)

    def begin_batch(self, dataloader_idx: int = 0) -> None:
        """Begin the stream of a batch, before Lightning does anything else with it. What user code draws until the
        step, for example in ``on_after_batch_transfer``, comes from a stream of the batch too."""
        trainer = self._trainer
        stage = trainer.state.stage
        training = stage is RunningStage.TRAINING
        if training:
            loop = trainer.fit_loop.epoch_loop
        else:
            loop = trainer.predict_loop if stage is RunningStage.PREDICTING else evaluation_loop(trainer)
        before = loop.batch_progress.current.ready
        dealt = self.source.position if training and self.source is not None else None
        position = before * self._num_pipelines + self._pipeline if dealt is None else dealt
        self.stream = (self._seed(), trainer.current_epoch, _KINDS[stage.value], dataloader_idx, position)
        self._common = mixed(*self.stream[:-1], before if dealt is None else dealt, _BETWEEN_STEPS)
        self._updates = 0
        self._streams.begin(*self.stream, _BEFORE_THE_STEP)


class EpochCallback(Callback):
    """Ends an epoch with equal replicas, and gives all workers the same metrics, mostly those of rank 0's pipeline,
    so that ModelCheckpoint, EarlyStopping and plateau schedulers decide alike everywhere. The strategy puts it first.

    Args:
        groups: this worker's process groups.
        turns: those of this worker.
        share: takes this worker's metrics and returns those that all workers get; it returns its argument where they
            stay local.
        random_states: returns those of all workers, for a checkpoint.
        checks: says when all look at the clock.
        draws: begins the streams that hooks draw from.
        meet: makes workers agree on what the hook of this name, at the end of an epoch, finds.
        loaded: the random states of the loaded checkpoint; None if none has been loaded yet.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        turns: Turns,
        share: Callable[[dict[str, float]], dict[str, float]],
        random_states: Callable[[], dict[str, Any]],
        checks: ClockChecks,
        draws: StreamSwitches,
        meet: Callable[[str], None],
        loaded: Mapping[str, Any] | None = None,
    ) -> None:
        self._groups = groups
        self._turns = turns
        self._share = share
        self._random_states = random_states
        self._checks = checks
        self._draws = draws
        self._meet = meet
        self._to_load = loaded
        self._saving: list[Callback] = []
        """Callbacks that save every n steps."""

    # Lightning asks every callback for these at each batch, and skips what is None
    on_before_zero_grad = on_before_backward = on_after_backward = on_before_optimizer_step = None  # type: ignore[assignment]

    def put_first(self, trainer: Any) -> None:
        """Put this before the callbacks of ``trainer``."""
        trainer.callbacks = [self, *trainer.callbacks]

    def take_out(self, trainer: Any) -> None:
        """Take this out of the callbacks of ``trainer`` again."""
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this object: it belongs to the run, and users may copy a Trainer's callbacks."""
        return self

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draws.between_batches("on_fit_start")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draws.between_batches("on_test_start")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draws.between_batches("on_predict_start")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draws.between_batches("on_train_end")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draws.between_batches("on_train_start")  # the setup of a run may draw, too
        self._checks.start(loop.batches(trainer))
        self._saving = [callback for callback in trainer.checkpoint_callbacks if steps_between_saves(callback) > 0]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["random_states"] = self._random_states()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._to_load = checkpoint.get("random_states")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._to_load is not None:  # only now: the setup of a run may draw as well
            random_states.restore(self._to_load, self._groups, trainer.strategy.root_device)
            self._to_load = None
        self._draws.between_batches("on_train_epoch_start")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch is None:  # the step takes it from an iterator
            self._draws.begin_batch()
        self._draws.between_steps(Point.BATCH_START)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._turns.pause()
        self._draws.between_batches("on_validation_start")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._draws.between_steps(Point.BATCH_END)
        if self._turns.underway:
            return
        due = self._checks.agreed(loop.batches(trainer))
        if due or (self._saving and self._saves_now(trainer.global_step)):
            self._turns.pause()
            self._share_metrics(trainer)
            if due:
                with self._turns.first_failure:
                    self._checks.look()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._turns.pause()
        self._meet("on_train_epoch_end")
        self._share_metrics(trainer)
        self._draws.between_batches("on_train_epoch_end")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meet("on_validation_epoch_end")
        self._draws.between_batches("on_validation_epoch_end")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meet("on_test_epoch_end")
        self._draws.between_batches("on_test_epoch_end")

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draws.between_batches("on_predict_epoch_end")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draws.between_batches("on_test_end")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draws.between_batches("on_predict_end")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draws.between_batches("on_fit_end")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._share_metrics(trainer)
        self._draws.between_batches("on_validation_end")

    def _saves_now(self, step: int) -> bool:
        return any(step % steps_between_saves(callback) == 0 for callback in self._saving)

    def _share_metrics(self, trainer: Trainer) -> None:
        with self._turns.first_failure:
            mine = {name: float(value) for name, value in trainer.callback_metrics.items()}  # reduces: on every rank
            shared = self._share(mine)
        self._turns.show(shared)
        if shared is not mine:
            adopt_metrics(trainer, {name: torch.tensor(value) for name, value in shared.items()})


def agree(trainer: Trainer, groups: ProcessGroups) -> None:
    """Make the replicas of this stage reduce the same values next, in one order: all that any of them has logged. A
    mean is taken over those that logged it. All of them must call it.

    Raises:
        WorkerFailedError: another replica is gone.
    """
    replicas = dist.get_process_group_ranks(groups.stage)
    if len(replicas) == 1:
        return
    mine = values_to_reduce(trainer)
    if not p2p.same(crc32(repr([*mine]).encode()), groups.stage, "agreeing on the values that were logged"):
        each = [p2p.broadcast_value(mine, replica, groups.stage) for replica in replicas]
        expect_values(trainer, {key: options for said in each[::-1] for key, options in said.items()})


def agree_in_evaluations(trainer: Trainer, groups: ProcessGroups, first_failure: AbstractContextManager[None]) -> None:
    """Make the replicas of this stage :func:`agree` at the end of each dataloader's evaluation."""

    def agreeing(evaluation: object) -> Callable[[], None]:
        def store() -> None:
            with first_failure:
                agree(trainer, groups)
            of_its_class(evaluation, Method.STORE_RESULTS)()

        return store

    for each in loop.evaluation_loops(trainer):
        replace(each, Method.STORE_RESULTS, agreeing(each))
