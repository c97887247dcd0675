"""Lightning's counters as an equal split of the epoch would have them, whatever this pipeline has trained itself, and
the number at which all pipelines meet next: batches are dealt up to there.

Batch numbers, ``global_step``, and the schedulers of the learning rate follow the progress of all. With dealt batches a
turn of the loop is one batch of this pipeline, in which they advance by one, by several or not at all.
"""

from __future__ import annotations

import math
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
        by_hand: whether the training step steps optimizers itself, as often as it likes (manual optimization). Then
            each pipeline of an equal split is assumed to step as often on a batch as this one in this segment, or else
            in the last.
    """

    def __init__(self, trainer: Trainer, closes: Callable[[], bool], by_hand: bool = False) -> None:
        self._trainer = trainer
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._closes = closes
        self._by_hand = by_hand
        self._passed = range(0)
        self._start = self._made = self._turns = 0
        self._pace = 0.0  # steps by hand on a batch, in the last segment in which this pipeline had any

    def begin(self) -> None:
        """Begin a segment where the counters are."""
        loop = self._loop
        self._pace = self._made / self._turns if self._turns else self._pace
        self._start, self._made, self._turns = self.number, 0, 0
        progress, counted = loop.batch_progress, self._counted(self.number)
        self._earlier_batches, self._counted_last = progress.total.ready - progress.current.ready, counted
        self._earlier_updates = self._updates.total.completed - counted, self._updates.current.completed - counted
        self._earlier_logs = logged_steps(self._trainer) - self._steps(self.number)

    @property
    def number(self) -> int:
        """Number of batches of the epoch that each pipeline has begun in an equal split."""
        number: int = self._loop.batch_progress.current.ready
        return number

    def advance(self, before: int, now: int, trained: bool = True) -> None:
        """Move the counters to ``now`` at the end of the turn at number ``before``, which may have ``trained`` a
        batch."""
        loop, steps = self._loop, self._steps(now)
        if trained:
            self._turns += 1
            self._made += self._updates.total.completed - self._earlier_updates[0] - self._counted_last
        self._passed = range(before + 1, now + 1)
        for tracker, earlier in ((loop.batch_progress.current, 0), (loop.batch_progress.total, self._earlier_batches)):
            tracker.ready = tracker.started = earlier + now
            tracker.processed = tracker.completed = earlier + now - 1  # Lightning counts these when it goes on
        self._count(int(min(self._counted(now), self._most)))
        loop.batch_progress.is_last_batch = now == self._end
        logged = self._logged(self._earlier_logs + self._steps(before), self._earlier_logs + steps)
        set_logged_steps(self._trainer, logged)

    def agree(self, from_leader: Callable[[list[float]], list[float]]) -> None:
        """Take over the leader's count of steps at the end of a segment, where all workers are together;
        ``from_leader`` returns the leader's numbers."""
        if self._by_hand:
            (total,) = from_leader([float(self._earlier_updates[0] + self._counted(self.number))])
            self._count(int(total) - self._earlier_updates[0])

    @property
    def _updates(self) -> Any:
        loop = self._loop
        if self._by_hand:
            return loop.manual_optimization.optim_step_progress
        return loop.automatic_optimization.optim_progress.optimizer.step

    def _counted(self, number: int) -> int:
        """Return how many steps are counted after ``number`` batches, besides those of earlier segments or epochs."""
        if not self._by_hand:
            return self._steps(number)
        pace = self._made / self._turns if self._turns else self._pace
        return round((number - self._start) * pace)

    @property
    def _most(self) -> float:
        """The most steps to count before all workers are together: at ``max_steps`` Lightning ends the epoch."""
        limit = self._loop.max_steps if self._by_hand else -1
        return math.inf if limit == -1 else limit - 1 - self._earlier_updates[0]

    def _count(self, steps: int) -> None:
        self._counted_last = steps
        for tracker, earlier in zip((self._updates.total, self._updates.current), self._earlier_updates, strict=True):
            tracker.ready = tracker.completed = earlier + steps

    def update_schedulers(self, plateau: bool) -> None:
        """Step the learning-rate schedulers that step by update, once for each update that has passed."""
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
        """Return how many updates of an epoch each pipeline has made after ``number`` batches of an equal split."""
        whole, more = divmod(number, self._trainer.accumulate_grad_batches)
        return whole + (number == self._end and more > 0)

    def _logged(self, before: int, now: int) -> int:
        """Return the number of steps to give loggers before this turn ends. A step whose logging was passed over is
        logged late, at its number."""
        every = self._trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and now // every > before // every and now != self._earlier_logs + self._steps(self._end):
            now -= now % every
        return now - self._closes()


def next_sync_point(trainer: Trainer, checks: ClockChecks, by_hand: bool = False) -> int:
    """Return after how many batches of this epoch, in an equal split, the next sync point comes: validation, a
    checkpoint, a look at the clock, ``max_steps``, or the end of the epoch. ``by_hand`` is as for
    :class:`EqualSplit`."""
    loop: Any = trainer.fit_loop.epoch_loop
    start: int = loop.batch_progress.current.ready
    end = int(trainer.num_training_batches)
    epochs_before: int = loop.batch_progress.total.ready - start
    accumulate = trainer.accumulate_grad_batches
    steps_before: int = trainer.global_step - start // accumulate

    def number_at(step: int) -> int:
        """Return after how many batches ``step`` steps have been made. In manual optimization, batches are assumed to
        take as many steps as those before; without any, return the next one."""
        if not by_hand:
            return (step - steps_before) * accumulate
        batches: int = loop.batch_progress.total.ready
        if not (trainer.global_step and batches):
            return start + 1
        return start + math.ceil((step - trainer.global_step) * batches / trainer.global_step - 1e-9)

    pauses: list[int] = [end]
    period: Any = trainer.val_check_batch
    if validates_in_this_epoch(trainer) and isinstance(period, int):
        before = epochs_before if trainer.check_val_every_n_epoch is None else 0
        pauses.append(_next_multiple(start + before, period) - before)
    for callback in saving_by_steps(trainer):
        step = _next_multiple(trainer.global_step, steps_between_saves(callback))
        pauses.append(number_at(step))
    if loop.max_steps != -1:
        pauses.append(number_at(loop.max_steps))
    if checks.next is not None:
        pauses.append(checks.next - epochs_before)
    return max(min(pauses), start + 1)


def saving_by_steps(trainer: Any) -> list[ModelCheckpoint]:
    """Return the callbacks of ``trainer`` that save every n steps."""
    found = (callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint))
    return [callback for callback in found if steps_between_saves(callback) > 0]


def save_at_sync_points(trainer: Trainer, underway: Callable[[], bool]) -> None:
    """Keep these callbacks from saving while pipelines are ``underway``: a step number may then come early or twice."""

    def changed(callback: Any) -> Callable[..., None]:
        def on_train_batch_end(*arguments: Any, **kwargs: Any) -> None:
            if not underway():
                type(callback).on_train_batch_end(callback, *arguments, **kwargs)

        return on_train_batch_end

    for callback in saving_by_steps(trainer):
        callback.on_train_batch_end = changed(callback)  # type: ignore[method-assign]


def _next_multiple(number: int, period: int) -> int:
    return (number // period + 1) * period
