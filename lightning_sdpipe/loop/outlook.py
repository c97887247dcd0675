"""Activity of a worker's Trainer, for users: what it does, in which epoch, how long it will take, and its metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.callbacks import Timer

from lightning_sdpipe.lightning_internals import seconds_between
from lightning_sdpipe.scheduler.rows import MOST_METRICS, Doing

_LONGEST = 255
"""Longest name of a metric, in characters."""
_NEVER = 1e9
"""Seconds (30 years) from which on the end counts as unknown, as with ``max_steps=sys.maxsize``."""


class Outlook:
    """Activity of ``trainer``, which begins to train. ``clock`` gives seconds."""

    def __init__(self, trainer: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._trainer, self._clock = trainer, clock
        self._began, self._first = clock(), self._share()
        self._ends = math.inf
        self.metrics: Mapping[str, float] = {}
        """Newest metrics that all workers have."""

    def doing(self) -> Doing:
        """Return what the Trainer does. Any thread may call it, so it only reads plain numbers."""
        trainer, now = self._trainer, self._clock()
        epochs = trainer.max_epochs if (trainer.max_epochs or -1) >= 0 else None
        for timer in trainer.callbacks:
            limit = seconds_between(timer) if isinstance(timer, Timer) else None  # None for a moment after a batch
            if limit is not None:
                self._ends = now + limit - timer.time_elapsed()
        share, left, metrics = self._share(), self._ends - now, self.metrics  # which the other thread replaces
        if share > self._first:
            left = min(left, (now - self._began) * (1 - share) / (share - self._first))
        return Doing(
            "validating" if trainer.validating or trainer.sanity_checking else "training",
            trainer.current_epoch if not epochs else min(trainer.current_epoch, epochs - 1),  # behind the last one
            epochs,
            max(0, round(left)) if left < _NEVER else None,
            tuple((name[:_LONGEST], f"{metrics[name]:.4g}") for name in sorted(metrics)[:MOST_METRICS]),
        )

    def _share(self) -> float:
        """Return the share of the training that is done, from 0 to 1; 0 if its end is not known."""
        trainer, shares = self._trainer, [0.0]
        if (trainer.max_epochs or -1) > 0:
            batches = trainer.num_training_batches
            done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            within = min(1.0, done / batches) if 0 < batches < math.inf else 0.0
            shares.append((trainer.current_epoch + within) / trainer.max_epochs)
        if trainer.max_steps > 0:
            shares.append(trainer.global_step / trainer.max_steps)
        return min(1.0, max(shares))
