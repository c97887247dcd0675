"""Keeping Lightning's loop from holding all ranks in step.

Before every training batch, Lightning broadcasts from rank 0 whether it has received SIGTERM. Every worker would wait
there for rank 0's worker, batch by batch, which is what a semi-decentralised run must not do (and what could deadlock
a worker that waits for its group). Here a worker that receives SIGTERM fails like any other, and the scheduler tells
the rest.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer


def release(trainer: Trainer) -> None:
    """Takes the per-batch broadcast out of ``trainer``'s loop, and its counterpart out of the SIGTERM handler.

    Must run before the Trainer registers its signal handlers, as ``Strategy.setup`` does.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    if hasattr(epoch_loop, "_broadcast_sigterm_tensor"):  # Lightning 2.6 and later
        epoch_loop._broadcast_sigterm_tensor = lambda: None
    connector: Any = trainer._signal_connector

    def note_sigterm(signum: signal.Signals, _: FrameType) -> None:
        launcher = trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note_sigterm
