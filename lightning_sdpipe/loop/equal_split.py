"""Lightning's counters as an equal split of the epoch would have them, whatever this pipeline has trained itself.

Batch numbers, ``global_step``, and the schedulers of the learning rate follow the progress of all. With dealt batches a
turn of the loop is one batch of this pipeline, in which they advance by one, by several or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer


class EqualSplit:
    """Moves the counters of ``trainer``'s loop.

    Args:
        trainer: about to fit.
        closes: does the batch of this turn end an accumulation of gradients of this pipeline?
    """

    def __init__(self, trainer: Trainer, closes: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._closes = closes
        self._passed = range(0)

    def begin(self) -> None:
        """A segment begins where the counters are."""
        loop = self._loop
        steps = self._steps(self.number)
        progress, updates = loop.batch_progress, loop.automatic_optimization.optim_progress.optimizer.step
        self._earlier_batches = progress.total.ready - progress.current.ready
        self._earlier_updates = updates.total.completed - steps, updates.current.completed - steps
        self._earlier_logs = loop._batches_that_stepped - steps

    @property
    def number(self) -> int:
        """How many batches of the epoch each of equal pipelines has begun."""
        number: int = self._loop.batch_progress.current.ready
        return number

    def advance(self, before: int, now: int) -> None:
        """The turn that trained a batch, at number ``before``, comes to its end at ``now``."""
        loop, steps = self._loop, self._steps(now)
        self._passed = range(before + 1, now + 1)
        for tracker, earlier in (
            (loop.batch_progress.current, 0),
            (loop.batch_progress.total, self._earlier_batches),
        ):
            tracker.ready = tracker.started = earlier + now
            tracker.processed = tracker.completed = earlier + now - 1  # Lightning counts these when it goes on
        updates = loop.automatic_optimization.optim_progress.optimizer.step
        for tracker, earlier in zip((updates.total, updates.current), self._earlier_updates, strict=True):
            tracker.ready = tracker.completed = earlier + steps
        loop.batch_progress.is_last_batch = now == self._end
        loop._batches_that_stepped = self._logged(self._earlier_logs + self._steps(before), self._earlier_logs + steps)

    def update_schedulers(self, plateau: bool) -> None:
        """Steps the schedulers of the learning rate that step with updates, once for each that has passed."""
        current = self._loop.batch_progress.current
        for number in self._passed:
            if self._steps(number) > self._steps(number - 1):
                now, current.ready = current.ready, number  # by which Lightning counts their frequency
                try:
                    self._loop._update_learning_rates(interval="step", update_plateau_schedulers=plateau)
                finally:
                    current.ready = now

    @property
    def _end(self) -> int:
        return int(self._trainer.num_training_batches)

    def _steps(self, number: int) -> int:
        """Updates of an epoch after ``number`` batches, on each of equal pipelines."""
        whole, more = divmod(number, self._trainer.accumulate_grad_batches)
        return whole + (number == self._end and more > 0)

    def _logged(self, before: int, now: int) -> int:
        """What counts for loggers before this turn ends. A step to be logged that is passed over is logged late, at its
        number."""
        every = self._trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and now // every > before // every and now != self._earlier_logs + self._steps(self._end):
            now -= now % every
        return now - self._closes()
