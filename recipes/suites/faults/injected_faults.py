"""Faults of one process: it ends itself in a phase of a step, or of what pipelines do between steps; and the diary that
it keeps until then."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L

from lightning_sdpipe.exchange import encoded_mean, moving, outer_state, present_rounds
from lightning_sdpipe.scheduler.client import client
from lightning_sdpipe.worker.elastic import barriers, replica, state_transfer

PHASES = (
    *("forward", "backward", "optimizer", "waiting", "exchange", "half_sent", "step_end"),
    *("pause", "validation", "checkpoint", "donor", "newcomer"),
)


@dataclass(frozen=True)
class Fault:
    """A process kills itself in ``phase`` of the first update from ``after`` on that it makes itself."""

    phase: str
    after: int


class Diary(L.Callback):
    """Writes down each update, and the samples of each batch."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def say(self, what: str, **more: Any) -> None:
        """One line, now."""
        os.write(self._file, (json.dumps({"what": what, "at": time.monotonic()} | more) + "\n").encode())

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.say("start", update=trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.say("update", update=trainer.global_step, processor=time.process_time())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.say("end", update=trainer.global_step)


class _Here(L.Callback):
    """Phases that Lightning calls."""

    def __init__(self, phase: str, strike: Callable[[], None]) -> None:
        self._phase, self._strike = phase, strike

    def _at(self, phase: str) -> None:
        if phase == self._phase:
            self._strike()

    def on_train_batch_start(self, *_: Any) -> None:
        self._at("forward")

    def on_before_backward(self, *_: Any) -> None:
        self._at("backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._at("optimizer")

    def on_train_batch_end(self, *_: Any) -> None:
        self._at("step_end")

    def on_validation_batch_start(self, *_: Any) -> None:
        self._at("validation")

    def on_save_checkpoint(self, *_: Any) -> None:
        self._at("checkpoint")


def inject(fault: Fault, trainer: L.Trainer, module: L.LightningModule, diary: Diary) -> None:
    """From the update ``fault.after`` on this process ends itself when it comes to ``fault.phase``."""

    def strike() -> None:
        if trainer.global_step >= fault.after or fault.phase == "newcomer":
            diary.say("strikes", update=trainer.global_step)
            os.kill(os.getpid(), signal.SIGKILL)

    # This callback comes after the others, so that what they note of a step is noted.
    trainer.callbacks.append(_Here(fault.phase, strike))  # type: ignore[attr-defined]
    match fault.phase:
        case "waiting":
            _before(client.SchedulerClient, "group", strike)
        case "exchange":
            _before(replica._FaultTolerantPending, "wait", strike)
            _before(present_rounds.PresentRounds, "outcome", strike)
            _before(outer_state.OuterState, "make", strike)
            _before(replica, "exchange_whole", strike)
        case "half_sent":
            _after(replica._FaultTolerantPending, "commit", strike)
            _after(present_rounds.PresentRounds, "_reduce", strike)
            _after(encoded_mean.EncodedMean, "average", strike)
            _after(moving._Pair, "wait", strike)
        case "pause":
            _before(barriers.Barriers, "meet", strike)
        case "donor":
            _before(state_transfer, "send_state", strike)
        case "newcomer":
            _after(state_transfer, "receive_state", strike)


def _before(owner: Any, name: str, strike: Callable[[], None]) -> None:
    whole = getattr(owner, name)

    def struck(*arguments: Any, **more: Any) -> Any:
        strike()
        return whole(*arguments, **more)

    setattr(owner, name, struck)


def _after(owner: Any, name: str, strike: Callable[[], None]) -> None:
    whole = getattr(owner, name)

    def struck(*arguments: Any, **more: Any) -> Any:
        outcome = whole(*arguments, **more)
        strike()
        return outcome

    setattr(owner, name, struck)
