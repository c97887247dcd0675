"""Places where a process can be made to end itself: each phase of a step, and of what pipelines do between steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L

from lightning_sdpipe.exchange import encoded_mean, moving, outer_state, present_rounds
from lightning_sdpipe.scheduler.client import client
from lightning_sdpipe.worker.elastic import barriers, replica, state_transfer
from recipes.suites.faults.diary import Diary, Fault

PHASES = (
    *("forward", "backward", "optimizer", "waiting", "exchange", "half_sent", "step_end"),
    *("pause", "validation", "checkpoint", "donor", "newcomer"),
)


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
            os.kill(os.getpid(), fault.signal)

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
