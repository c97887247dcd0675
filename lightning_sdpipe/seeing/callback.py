"""A callback that logs what a run's workers do to the Trainer's loggers."""

from __future__ import annotations

import threading
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_sdpipe import meter
from lightning_sdpipe.errors import ConfigurationError, SchedulerError, check_integer
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.seeing.detectors import findings
from lightning_sdpipe.seeing.following import Follower

_ANSWER_WITHIN = 5.0
_KEPT = 128
"""Number of newest updates that are searched for findings; few, since this runs beside rank 0's training."""
_LAST_WITHIN = 1.0
"""Seconds that the end of training waits for an answer."""
_SHARES = {
    "own": tuple(range(meter.OWN)),
    "waits_for_pipeline": (meter.WAIT_UP, meter.WAIT_DOWN, meter.SEND, meter.WAIT_STAGE),
    "waits_for_replicas": (meter.WAIT_GROUP,),
    "exchange": (meter.EXCHANGE,),
}


class RunMetrics(Callback):
    """Logs what all workers do: the Trainer's loggers get ``sdpipe/samples_per_second``, ``sdpipe/findings``,
    ``sdpipe/blind`` and, as shares of the time of each stage's workers since the last answer, ``sdpipe/stage_0/own``,
    ``…/waits_for_pipeline``, ``…/waits_for_replicas`` and ``…/exchange``.

    Rank 0 asks the scheduler in a thread. It logs the answer at the end of the first batch after the answer came, for
    the step at which it asked: no step waits for it, no logger is called by two threads, and nothing is reduced among
    workers. It asks nothing more until it has an answer.

    Args:
        every: number of optimizer steps between two questions.

    Raises:
        ConfigurationError: ``every`` is not an integer of at least 1; or, when training begins, the strategy has no
            scheduler.
    """

    def __init__(self, every: int = 50) -> None:
        check_integer("every", every, 1, "optimizer steps")
        self.every = every
        self._follower: Follower | None = None
        self._asking: threading.Thread | None = None
        self._asked_at = 0
        self._metrics: dict[str, float] = {}
        self._before: dict[int, list[int]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        connected: Any = getattr(trainer.strategy, "membership", None)
        if connected is None:
            raise ConfigurationError(
                f"RunMetrics asks the scheduler of a run, and {type(trainer.strategy).__name__} has none; leave it "
                "out, or train with SDPipeStrategy"
            )
        if trainer.is_global_zero and trainer.loggers:
            client: SchedulerClient = connected.client
            self._follower = Follower(client.address, client.credentials, _KEPT)
            self._asked_at = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._asking is not None and not self._asking.is_alive():
            self._log(trainer)
        if self._follower is not None and self._asking is None and trainer.global_step - self._asked_at >= self.every:
            self._asked_at = trainer.global_step
            self._asking = threading.Thread(target=self._ask, args=(self._follower,), daemon=True)
            self._asking.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._asking is not None:
            self._asking.join(_LAST_WITHIN)
            if not self._asking.is_alive():
                self._log(trainer)
        self._asking = self._follower = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._asking = self._follower = None

    def _log(self, trainer: Trainer) -> None:
        self._asking = None
        for logger in trainer.loggers if self._metrics else ():
            logger.log_metrics(self._metrics, self._asked_at)

    def _ask(self, follower: Follower) -> None:
        try:
            recording, _ = follower.poll(_ANSWER_WITHIN)
        except SchedulerError:  # training notices this itself; unknown metrics are not logged
            self._metrics = {}
            return
        found = findings(recording)
        metrics = {
            "sdpipe/findings": float(sum(finding.severity in ("warning", "critical") for finding in found)),
            "sdpipe/blind": float(any(finding.severity == "blind" for finding in found)),
        }
        if (rate := recording.samples_per_second()) is not None:
            metrics["sdpipe/samples_per_second"] = rate
        now: dict[int, list[int]] = {}
        for worker, (_, *us) in follower.totals.items():
            now[worker.stage] = [a + b for a, b in zip(now.get(worker.stage, [0] * len(us)), us, strict=True)]
        for stage, us in sorted(now.items()):
            passed = [a - b for a, b in zip(us, self._before.get(stage, [0] * len(us)), strict=True)]
            for name, phases in _SHARES.items() if sum(passed) else ():
                metrics[f"sdpipe/stage_{stage}/{name}"] = sum(passed[phase] for phase in phases) / sum(passed)
        self._before, self._metrics = now, metrics
