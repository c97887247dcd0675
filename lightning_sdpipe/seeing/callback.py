"""Callback that logs what the workers of a run do to the loggers of its Trainer."""

from __future__ import annotations

import threading
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_sdpipe import meter
from lightning_sdpipe.errors import ConfigurationError, SchedulerError
from lightning_sdpipe.policies.policy import check_integer
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.seeing.detectors import findings
from lightning_sdpipe.seeing.following import Follower
from lightning_sdpipe.seeing.recording import Recording

_ANSWER_WITHIN = 5.0
_KEPT = 128
"""Number of newest updates in which findings are looked for, beside rank 0's training."""
_LAST_WITHIN = 1.0
"""Seconds for which the end of training waits for an answer."""
_SHARES = {
    "own": tuple(range(meter.OWN)),
    "waits_for_pipeline": (meter.WAIT_UP, meter.WAIT_DOWN, meter.SEND, meter.WAIT_STAGE),
    "waits_for_replicas": (meter.WAIT_GROUP,),
    "exchange": (meter.EXCHANGE,),
}


class RunMetrics(Callback):
    """Logs the activity of all workers: ``trainer.logger`` gets ``sdpipe/samples_per_second``, ``sdpipe/findings``,
    ``sdpipe/blind`` and, as shares of the time of each stage's workers since it was logged last,
    ``sdpipe/stage_0/own``, ``…/waits_for_pipeline``, ``…/waits_for_replicas`` and ``…/exchange``.

    Rank 0 asks the scheduler in a thread, and logs the answer, for the step in which it asked, at the end of the first
    batch after the answer came: no step waits for it, no logger is called by two threads, and nothing is reduced among
    workers. A question is left out while the one before is not answered.

    Args:
        every: optimizer steps between questions.

    Raises:
        ConfigurationError: ``every`` is not a number of at least 1; or, when training begins, the strategy has no
            scheduler.
    """

    def __init__(self, every: int = 50) -> None:
        check_integer("every", every, 1, "optimizer steps")
        self.every = every
        self._asking: _Asking | None = None
        self._asked_at = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        connected: Any = getattr(trainer.strategy, "membership", None)
        if connected is None:
            raise ConfigurationError(
                f"RunMetrics asks the scheduler of a run, and {type(trainer.strategy).__name__} has none; leave it "
                "out, or train with SDPipeStrategy"
            )
        if trainer.is_global_zero and trainer.loggers:
            client: SchedulerClient = connected.client
            self._asking = _Asking(Follower(client.address, client.credentials, _KEPT))
            self._asked_at = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._asking is None:
            return
        self._log(trainer)
        if trainer.global_step - self._asked_at >= self.every and self._asking.ask(trainer.global_step):
            self._asked_at = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._asking is not None:
            self._asking.end(_LAST_WITHIN)
            self._log(trainer)
            self._asking = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._asking is not None:
            self._asking.end(0.0)
            self._asking = None

    def _log(self, trainer: Trainer) -> None:
        assert self._asking is not None
        if (answered := self._asking.answer()) is not None:
            step, metrics = answered
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step)


class _Asking:
    """A thread that examines a run on request."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._before: dict[int, list[int]] = {}
        self._changed = threading.Condition()
        self._step: int | None = None
        self._answer: tuple[int, dict[str, float]] | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name="metrics of the run", daemon=True)
        self._thread.start()

    def ask(self, step: int) -> bool:
        """Request what is to be logged at ``step``; return False while the thread is busy."""
        with self._changed:
            if self._step is not None:
                return False
            self._step = step
            self._changed.notify()
            return True

    def answer(self) -> tuple[int, dict[str, float]] | None:
        """Return the step and its metrics, if they are known and were not taken."""
        with self._changed:
            answer, self._answer = self._answer, None
            return answer

    def end(self, seconds: float) -> None:
        """Wait ``seconds`` for an answer that is to come."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._step is not None or self._over)
                step = self._step
            if step is None:
                return
            try:
                metrics = self._metrics(self._follower.look(_ANSWER_WITHIN)[0])
            except SchedulerError:  # training itself finds this out; unknown metrics are not logged
                metrics = {}
            with self._changed:
                self._step = None
                if metrics:
                    self._answer = step, metrics

    def _metrics(self, recording: Recording) -> dict[str, float]:
        found = findings(recording)
        metrics = {
            "sdpipe/findings": float(sum(finding.severity in ("warning", "critical") for finding in found)),
            "sdpipe/blind": float(any(finding.severity == "blind" for finding in found)),
        }
        if (rate := recording.samples_per_second()) is not None:
            metrics["sdpipe/samples_per_second"] = rate
        now: dict[int, list[int]] = {}
        for worker, totals in self._follower.totals.items():
            sums = now.setdefault(worker.stage, [0] * len(meter.PHASES))
            now[worker.stage] = [a + b for a, b in zip(sums, totals.us, strict=True)]
        for stage, us in sorted(now.items()):
            before = self._before.get(stage, [0] * len(meter.PHASES))
            passed = [a - b for a, b in zip(us, before, strict=True)]
            for name, phases in _SHARES.items() if sum(passed) else ():
                metrics[f"sdpipe/stage_{stage}/{name}"] = sum(passed[phase] for phase in phases) / sum(passed)
        self._before = now
        return metrics
