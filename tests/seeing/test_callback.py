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
from lightning_sdpipe.meter import EXCHANGE, FORWARD, PHASES
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.seeing.following import Follower
from lightning_sdpipe.seeing.recording import Recording
from tests.seeing.recordings import chunks, recording

A, B = Worker(0, 0), Worker(0, 1)


class Scripted(Follower):
    """One whose looks are those of a list: what ``workers`` have done by then, or what is raised."""

    def __init__(self, *looks: Callable[[], Recording]) -> None:
        super().__init__("tcp://10.0.0.1:5555", None)
        self.looks = list(looks)
        self.threads: set[int] = set()

    def poll(self, timeout: float) -> Any:
        self.threads.add(threading.get_ident())
        return self.looks.pop(0)(), None


class Logged:
    """A Trainer at ``global_step``, and what its logger got."""

    def __init__(self) -> None:
        self.is_global_zero, self.global_step, self.loggers = True, 0, [self]
        self.metrics: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.metrics.append((step, metrics))

    def trained(self, callback: RunMetrics, *steps: int) -> None:
        """To each of ``steps``; its question is answered before the next, and the last at the end of training."""
        for step in steps:
            if callback._asking is not None:
                callback._asking.join()
            self.global_step = step
            callback.on_train_batch_end(self, None, None, None, 0)  # type: ignore[arg-type]
        callback.on_train_end(self, None)  # type: ignore[arg-type]


def asking(follower: Follower) -> RunMetrics:
    callback = RunMetrics(50)
    callback._follower = follower
    return callback


def test_shares_are_of_the_time_since_it_was_logged_last() -> None:
    def worked(forward: int, exchange: int) -> Callable[[], Recording]:
        def look() -> Recording:
            for worker in (A, B):
                totals = follower.totals.setdefault(worker, [0] * (1 + len(PHASES)))
                totals[1 + FORWARD] += forward
                totals[1 + EXCHANGE] += exchange
            return recording(
                {worker: chunks(worker, [own] * 128, every=90.0) for worker, own in ((A, 60.0), (B, 90.0))}
            )

        return look

    follower, trainer = Scripted(worked(300, 100), worked(100, 100)), Logged()
    trainer.trained(asking(follower), 40, 50, 60, 99, 100)
    (step, found), (last, later) = trainer.metrics
    assert (step, last) == (50, 100)
    assert found["sdpipe/stage_0/own"] == 0.75
    assert found["sdpipe/stage_0/exchange"] == 0.25
    assert (found["sdpipe/findings"], found["sdpipe/blind"]) == (1, 0)
    assert "sdpipe/samples_per_second" not in found, "the size of a batch is not known"
    assert later["sdpipe/stage_0/own"] == 0.5
    assert threading.get_ident() not in follower.threads


def test_what_a_silent_scheduler_would_have_said_is_not_logged() -> None:
    def silent() -> Recording:
        raise SchedulerError("it does not answer")

    trainer = Logged()
    trainer.trained(asking(Scripted(silent)), 50, 60)
    assert trainer.metrics == []


def test_it_is_refused_without_a_scheduler(tmp_path: Path) -> None:
    for every in (0, -1, 1.5, True):
        with pytest.raises(ConfigurationError, match="every"):
            RunMetrics(every)  # type: ignore[arg-type]
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="SingleDeviceStrategy has none"):
        RunMetrics().on_train_start(trainer, L.LightningModule())
