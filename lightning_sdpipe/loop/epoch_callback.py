"""A callback that acts on every worker before any user's callback sees the end of an epoch, or saves a checkpoint; and
agreement on the values that steps log in some pipelines only, or in another order: the loss of each class in a batch,
for example.

Where an epoch ends, Lightning reduces the logged values one by one, in the order in which they were logged. A pipeline
that has logged others would be at another value, and numbers that have nothing to do with each other would be reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_sdpipe import p2p
from lightning_sdpipe.checkpoints import random_states
from lightning_sdpipe.lightning_internals import Method, of_its_class, replace, restore, steps_between_saves
from lightning_sdpipe.lightning_results import adopt_metrics, expect_values, values_to_reduce
from lightning_sdpipe.loop import loop
from lightning_sdpipe.loop.batch_source import Turns
from lightning_sdpipe.loop.loop import ClockChecks
from lightning_sdpipe.loop.stream_switches import Point, StreamSwitches
from lightning_sdpipe.topology.groups import ProcessGroups


class EpochCallback(Callback):
    """Ends an epoch with equal replicas, and gives all workers the same metrics, mostly those of rank 0's pipeline,
    so that ModelCheckpoint, EarlyStopping and plateau schedulers decide alike everywhere. The strategy puts it first.

    Args:
        groups: this worker's process groups.
        turns: those of this worker.
        share: returns the metrics that all workers get from those of each; it returns its argument where they stay
            local.
        random_states: returns those of all workers, for a checkpoint.
        checks: says when all look at the clock.
        draws: begin the streams that hooks draw from.
        meet: makes workers agree on what the hook of this name, which ends an epoch, finds on all of them.
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
    ) -> None:
        self._groups = groups
        self._turns = turns
        self._share = share
        self._random_states = random_states
        self._checks = checks
        self._draws = draws
        self._meet = meet
        self._to_load: Mapping[str, Any] | None = None
        self._saving: list[Callback] = []
        """Callbacks that save after so many steps."""

    # Lightning asks every callback for these at each batch, and passes over what is none
    on_before_zero_grad = on_before_backward = on_after_backward = on_before_optimizer_step = None  # type: ignore[assignment]

    def put_first(self, trainer: Any) -> None:
        """Put this before the callbacks of ``trainer``, in the place of one that an earlier run has left there."""
        trainer.callbacks = [self, *(c for c in trainer.callbacks if not isinstance(c, EpochCallback))]

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

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meet("on_test_epoch_end")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._share_metrics(trainer)
        self._draws.between_batches("on_validation_end")

    def _saves_now(self, step: int) -> bool:
        return any(step % steps_between_saves(callback) == 0 for callback in self._saving)

    def _share_metrics(self, trainer: Trainer) -> None:
        with self._turns.first_failure:
            mine = {name: float(value) for name, value in trainer.callback_metrics.items()}  # reduces: on every rank
            everybodys = self._share(mine)
        if everybodys is not mine:
            adopt_metrics(trainer, {name: torch.tensor(value) for name, value in everybodys.items()})


def agree(trainer: Trainer, groups: ProcessGroups) -> None:
    """Make the replicas of this stage reduce the same values next, in one order: all that any of them has logged. A
    mean is that over those that logged it. All of them must call it.

    Raises:
        WorkerFailedError: another one is gone.
    """
    replicas = dist.get_process_group_ranks(groups.stage)
    if len(replicas) == 1:
        return
    mine = values_to_reduce(trainer)
    digest = crc32(repr([*mine]).encode())
    extremes = torch.tensor([digest, -digest])
    with p2p.waiting_for(groups.stage, "agreeing on the values that were logged"):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=groups.stage)
    if extremes.sum() != 0:
        each = [p2p.broadcast_value(mine, replica, groups.stage) for replica in replicas]
        expect_values(trainer, {key: options for said in each[::-1] for key, options in said.items()})


def agree_in_evaluations(
    trainer: Trainer, groups: ProcessGroups, first_failure: AbstractContextManager[None]
) -> Callable[[], None]:
    """Let the replicas of this stage agree where the evaluation of a dataloader ends. Return a function that undoes
    it."""
    loops = [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]

    def agreeing(evaluation: object) -> Callable[[], None]:
        def store() -> None:
            with first_failure:
                agree(trainer, groups)
            of_its_class(evaluation, Method.STORE_RESULTS)()

        return store

    for each in loops:
        replace(each, Method.STORE_RESULTS, agreeing(each))

    def undo() -> None:
        for each in loops:
            restore(each, Method.STORE_RESULTS)

    return undo
