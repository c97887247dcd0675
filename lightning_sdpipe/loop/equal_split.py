"""Lightning's counters as an equal split of the epoch would have them, whatever this pipeline has trained itself, and
the number at which all pipelines meet next: batches are dealt up to there.

Batch numbers, ``global_step``, and the schedulers of the learning rate follow the progress of all. With dealt batches a
turn of the loop is one batch of this pipeline, in which they advance by one, by several or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_sdpipe.lightning_internals import (
    logged_steps,
    set_logged_steps,
    step_schedulers,
    steps_between_saves,
    validates_in_this_epoch,
)
from lightning_sdpipe.loop.loop import ClockChecks


class EqualSplit:
    """Moves the counters of ``trainer``'s loop.

    Args:
        trainer: about to fit.
        closes: returns whether the batch of this turn ends an accumulation of gradients of this pipeline.
    """

    def __init__(self, trainer: Trainer, closes: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._closes = closes
        self._passed = range(0)

    def begin(self) -> None:
        """Begin a segment where the counters are."""
        loop = self._loop
        steps = self._steps(self.number)
        progress, updates = loop.batch_progress, loop.automatic_optimization.optim_progress.optimizer.step
        self._earlier_batches = progress.total.ready - progress.current.ready
        self._earlier_updates = updates.total.completed - steps, updates.current.completed - steps
        self._earlier_logs = logged_steps(self._trainer) - steps

    @property
    def number(self) -> int:
        """Number of batches of the epoch that each of equal pipelines has begun."""
        number: int = self._loop.batch_progress.current.ready
        return number

    def advance(self, before: int, now: int) -> None:
        """Move the counters to ``now`` at the end of the turn that trained a batch, at number ``before``."""
        loop, steps = self._loop, self._steps(now)
        self._passed = range(before + 1, now + 1)
        for tracker, earlier in ((loop.batch_progress.current, 0), (loop.batch_progress.total, self._earlier_batches)):
            tracker.ready = tracker.started = earlier + now
            tracker.processed = tracker.completed = earlier + now - 1  # Lightning counts these when it goes on
        updates = loop.automatic_optimization.optim_progress.optimizer.step
        for tracker, earlier in zip((updates.total, updates.current), self._earlier_updates, strict=True):
            tracker.ready = tracker.completed = earlier + steps
        loop.batch_progress.is_last_batch = now == self._end
        logged = self._logged(self._earlier_logs + self._steps(before), self._earlier_logs + steps)
        set_logged_steps(self._trainer, logged)

    def update_schedulers(self, plateau: bool) -> None:
        """Step the schedulers of the learning rate that step with updates, once for each that has passed."""
        current = self._loop.batch_progress.current
        for number in self._passed:
            if self._steps(number) > self._steps(number - 1):
                now, current.ready = current.ready, number  # by which Lightning counts their frequency
                try:
                    step_schedulers(self._trainer, plateau)
                finally:
                    current.ready = now

    @property
    def _end(self) -> int:
        return int(self._trainer.num_training_batches)

    def _steps(self, number: int) -> int:
        """Return the updates of an epoch after ``number`` batches, on each of equal pipelines."""
        whole, more = divmod(number, self._trainer.accumulate_grad_batches)
        return whole + (number == self._end and more > 0)

    def _logged(self, before: int, now: int) -> int:
        """Return what counts for loggers before this turn ends. A step to be logged that is passed over is logged late,
        at its number."""
        every = self._trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and now // every > before // every and now != self._earlier_logs + self._steps(self._end):
            now -= now % every
        return now - self._closes()


def next_sync_point(trainer: Trainer, checks: ClockChecks) -> int:
    """Return after how many batches of this epoch, on each of equal pipelines, the next sync point comes: validation, a
    checkpoint, a look at the clock, ``max_steps``, or the end of the epoch."""
    loop: Any = trainer.fit_loop.epoch_loop
    start: int = loop.batch_progress.current.ready
    end = int(trainer.num_training_batches)
    epochs_before: int = loop.batch_progress.total.ready - start
    accumulate = trainer.accumulate_grad_batches
    steps_before: int = trainer.global_step - start // accumulate
    pauses: list[int] = [end]
    period: Any = trainer.val_check_batch
    if validates_in_this_epoch(trainer) and isinstance(period, int):
        before = epochs_before if trainer.check_val_every_n_epoch is None else 0
        pauses.append(_next_multiple(start + before, period) - before)
    for callback in saving_by_steps(trainer):
        step = _next_multiple(trainer.global_step, steps_between_saves(callback))
        pauses.append((step - steps_before) * accumulate)
    if loop.max_steps != -1:
        pauses.append((loop.max_steps - steps_before) * accumulate)
    if checks.next is not None:
        pauses.append(checks.next - epochs_before)
    return max(min(pauses), start + 1)


def saving_by_steps(trainer: Any) -> list[ModelCheckpoint]:
    """Return the callbacks of ``trainer`` that save after every so many steps."""
    found = (callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint))
    return [callback for callback in found if steps_between_saves(callback) > 0]


def save_at_sync_points(trainer: Trainer, underway: Callable[[], bool]) -> None:
    """Keep them from saving where a number of steps is seen again, or early, while pipelines are ``underway``."""

    def changed(callback: Any) -> Callable[..., None]:
        def on_train_batch_end(*arguments: Any, **kwargs: Any) -> None:
            if not underway():
                type(callback).on_train_batch_end(callback, *arguments, **kwargs)

        return on_train_batch_end

    for callback in saving_by_steps(trainer):
        callback.on_train_batch_end = changed(callback)  # type: ignore[method-assign]


def _next_multiple(number: int, period: int) -> int:
    return (number // period + 1) * period
