"""Where all pipelines meet next, known beforehand: batches are dealt up to there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_sdpipe.loop.clock import ClockChecks


def next_sync_point(trainer: Trainer, checks: ClockChecks) -> int:
    """After how many batches of this epoch, on each of equal pipelines, training pauses next: for validation, a
    checkpoint, a look at the clock, ``max_steps``, or the end of the epoch."""
    loop: Any = trainer.fit_loop.epoch_loop
    start: int = loop.batch_progress.current.ready
    end = int(trainer.num_training_batches)
    epochs_before: int = loop.batch_progress.total.ready - start
    accumulate = trainer.accumulate_grad_batches
    steps_before: int = trainer.global_step - start // accumulate
    pauses: list[int] = [end]
    period: Any = trainer.val_check_batch
    if loop._should_check_val_epoch() and isinstance(period, int):
        before = epochs_before if trainer.check_val_every_n_epoch is None else 0
        pauses.append(_next_multiple(start + before, period) - before)
    for callback in saving_by_steps(trainer):
        step = _next_multiple(trainer.global_step, callback._every_n_train_steps)
        pauses.append((step - steps_before) * accumulate)
    if loop.max_steps != -1:
        pauses.append((loop.max_steps - steps_before) * accumulate)
    if checks.next is not None:
        pauses.append(checks.next - epochs_before)
    return max(min(pauses), start + 1)


def saving_by_steps(trainer: Any) -> list[ModelCheckpoint]:
    """The callbacks of ``trainer`` that save after every so many steps."""
    found = (callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint))
    return [callback for callback in found if callback._every_n_train_steps > 0]


def save_at_sync_points(trainer: Trainer, underway: Callable[[], bool]) -> None:
    """Keeps them from saving where a number of steps is seen again, or early, while pipelines are ``underway``."""

    def changed(callback: Any) -> Callable[..., None]:
        def on_train_batch_end(*arguments: Any, **kwargs: Any) -> None:
            if not underway():
                type(callback).on_train_batch_end(callback, *arguments, **kwargs)

        return on_train_batch_end

    for callback in saving_by_steps(trainer):
        callback.on_train_batch_end = changed(callback)  # type: ignore[method-assign]


def _next_multiple(number: int, period: int) -> int:
    return (number // period + 1) * period
