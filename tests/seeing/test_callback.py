"""Metrics of a run for its loggers: asked for in a thread, logged where the Trainer is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_sdpipe import RunMetrics
from lightning_sdpipe.errors import ConfigurationError, SchedulerError
from lightning_sdpipe.meter import EXCHANGE, FORWARD
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.seeing.callback import _Asking
from lightning_sdpipe.seeing.following import Follower, Totals
from lightning_sdpipe.seeing.recording import Recording
from tests.seeing.recordings import chunks, recording

A, B = Worker(0, 0), Worker(0, 1)


class Scripted(Follower):
    """One whose looks are those of a list: what ``workers`` have done by then, or what is raised."""

    def __init__(self, *looks: Callable[[], Recording]) -> None:
        super().__init__("tcp://10.0.0.1:5555", None)
        self.looks = list(looks)
        self.threads: set[int] = set()

    def look(self, timeout: float) -> Any:
        self.threads.add(threading.get_ident())
        return self.looks.pop(0)(), None


def answered(asking: _Asking, step: int) -> dict[str, float]:
    assert asking.ask(step)
    while (answer := asking.answer()) is None:
        threading.Event().wait(0.001)
    assert answer[0] == step
    return answer[1]


def test_shares_are_of_the_time_since_it_was_logged_last() -> None:
    def worked(forward: int, exchange: int) -> Callable[[], Recording]:
        def look() -> Recording:
            for worker in (A, B):
                totals = follower.totals.setdefault(worker, Totals())
                totals.us[FORWARD] += forward
                totals.us[EXCHANGE] += exchange
            return recording(
                {worker: chunks(worker, [own] * 128, every=90.0) for worker, own in ((A, 60.0), (B, 90.0))}
            )

        return look

    follower = Scripted(worked(300, 100), worked(100, 100))
    asking = _Asking(follower)
    found = answered(asking, 50)
    assert found["sdpipe/stage_0/own"] == 0.75
    assert found["sdpipe/stage_0/exchange"] == 0.25
    assert (found["sdpipe/findings"], found["sdpipe/blind"]) == (1, 0)
    assert "sdpipe/samples_per_second" not in found, "the size of a batch is not known"
    assert asking.ask(100)
    asking.end(5.0)
    step, found = asking.answer() or (0, {})
    assert (step, found["sdpipe/stage_0/own"]) == (100, 0.5)
    assert threading.get_ident() not in follower.threads


def test_what_a_silent_scheduler_would_have_said_is_not_logged() -> None:
    def silent() -> Recording:
        raise SchedulerError("it does not answer")

    asking = _Asking(Scripted(silent))
    assert asking.ask(50)
    asking.end(5.0)
    assert asking.answer() is None


def test_it_is_refused_without_a_scheduler(tmp_path: Path) -> None:
    for every in (0, -1, 1.5, True):
        with pytest.raises(ConfigurationError, match="every"):
            RunMetrics(every)  # type: ignore[arg-type]
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="SingleDeviceStrategy has none"):
        RunMetrics().on_train_start(trainer, L.LightningModule())
