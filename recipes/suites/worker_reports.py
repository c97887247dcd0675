"""Report of what each worker of a training did with its time, from a given iteration on."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import lightning as L

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.heterogeneity.injector import DelayInjector
from recipes.suites.ratios import Row

SHARES = ("compute", "delays", "group_wait", "averaging", "pipeline_wait")
"""What a worker's time goes to."""


@dataclass(frozen=True)
class Counters:
    """The counters of what a worker has used so far; seconds, unless it says otherwise."""

    clock: float
    processor: float = 0.0
    computed: float = 0.0
    injected: float = 0.0
    waiting: float = 0.0  # for its group
    averaging: float = 0.0
    groups: float = 0.0  # a number
    members: float = 0.0  # of all groups together

    def __sub__(self, before: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


@dataclass(frozen=True)
class WorkerReport:
    """One worker's time over ``iterations`` iterations."""

    stage: int
    pipeline: int
    iterations: int
    used: Counters
    epoch: tuple[int, float] | None = None  # all iterations, and the seconds of the whole epoch with its end


def counters(injector: DelayInjector, averaging: float = 0.0) -> Counters:
    """Now, of this process."""
    return Counters(
        clock=time.perf_counter(),
        processor=time.process_time(),
        computed=injector.computed_seconds,
        injected=injector.injected_seconds,
        averaging=averaging,
    )


def strategy_counters(strategy: SDPipeStrategy) -> Counters:
    """Now, of this process."""
    found = strategy.statistics
    return replace(
        counters(strategy.injector, found.seconds_averaging),
        waiting=found.seconds_waiting,
        groups=found.groups,
        members=found.members,
    )


class Probe(L.Callback):
    """Writes a report of each worker into a directory, once the epoch's last mini-batch is done.

    Args:
        directory: where the files go.
        warm_up: how many iterations do not count.
    """

    def __init__(self, directory: Path, warm_up: int) -> None:
        self._directory = directory
        self._warm_up = warm_up
        self._iterations = 0
        self._epoch: tuple[int, float] | None = None
        self._before: Counters | None = None
        self._after: Counters | None = None

    def now(self, trainer: L.Trainer) -> Counters:
        assert isinstance(trainer.strategy, SDPipeStrategy)
        return strategy_counters(trainer.strategy)

    def place(self, trainer: L.Trainer) -> tuple[int, int]:
        """Stage and pipeline."""
        assert isinstance(trainer.strategy, SDPipeStrategy)
        return trainer.strategy.mesh.locate(trainer.global_rank)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._epoch = self._iterations, time.perf_counter() - self._start

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._iterations += 1
        self._after = self.now(trainer)
        if self._iterations == self._warm_up:
            self._before = self._after

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self._before is not None
        assert self._after is not None
        stage, pipeline = self.place(trainer)
        used = self._after - self._before
        report = WorkerReport(stage, pipeline, self._iterations - self._warm_up, used, self._epoch)
        (self._directory / f"{trainer.global_rank}.json").write_text(json.dumps(asdict(report)))


def read_reports(directory: Path) -> list[WorkerReport]:
    """Return what the probes of a training wrote, by rank."""
    files = sorted(directory.glob("*.json"), key=lambda file: int(file.stem))
    plain = [json.loads(file.read_text()) for file in files]
    return [WorkerReport(**{**report, "used": Counters(**report["used"])}) for report in plain]


def summary(reports: Sequence[WorkerReport], samples: int, cores: int) -> Row:
    """Throughput and shares of a training.

    Each pipeline is timed over its own iterations, so that all methods are judged by the same delays; samples_per_s is
    the sum of their rates. A user sees less: an epoch has all samples once the last pipeline has trained its own.

    Args:
        reports: of all workers.
        samples: of a mini-batch of one pipeline.
        cores: of the machine.

    Returns:
        samples_per_s; visible_samples_per_s, all samples of the epoch over its wall time with the first iterations and
        its end, None where it was not timed; iteration_ms, of one pipeline; group_size; the mean shares of the workers'
        time: compute, delays, group_wait, averaging, pipeline_wait (for other stages, with what Lightning does in
        between); busy, the share of the cores' time that these processes used; processor_s, what one iteration of all
        pipelines used; and the shares of each worker.

    Raises:
        ValueError: pipelines trained unlike numbers of iterations, so that they met unlike delays.
    """
    first_stages = [report for report in reports if report.stage == 0]
    iterations = first_stages[0].iterations
    if unlike := {report.iterations for report in first_stages} - {iterations}:
        raise ValueError(f"pipelines trained {iterations} and {max(unlike)} iterations; use data='sharded'")
    rates = [iterations / report.used.clock for report in first_stages]
    shares = [_shares(report.used) for report in reports]
    groups = sum(report.used.groups for report in reports)
    processor = sum(report.used.processor for report in reports)
    return {
        "samples_per_s": samples * sum(rates),
        "visible_samples_per_s": _visible(first_stages, samples),
        "iteration_ms": 1e3 / statistics.fmean(rates),
        "group_size": sum(report.used.members for report in reports) / groups if groups else 1.0,
        **{name: statistics.fmean(share[name] for share in shares) for name in shares[0]},
        "injected_s": sum(report.used.injected for report in reports),
        "busy": processor / (cores * max(report.used.clock for report in reports)),
        "processor_s": processor / iterations,
        "workers": [
            {"stage": report.stage, "pipeline": report.pipeline, **share}
            for report, share in zip(reports, shares, strict=True)
        ],
    }


def _visible(first_stages: Sequence[WorkerReport], samples: int) -> float | None:
    epochs = [report.epoch for report in first_stages if report.epoch is not None]
    if len(epochs) < len(first_stages):
        return None
    return samples * sum(iterations for iterations, _ in epochs) / max(seconds for _, seconds in epochs)


def _shares(used: Counters) -> dict[str, float]:
    shares = {
        "compute": used.computed / used.clock,
        "delays": used.injected / used.clock,
        "group_wait": used.waiting / used.clock,
        "averaging": used.averaging / used.clock,
    }
    return shares | {"pipeline_wait": max(0.0, 1.0 - sum(shares.values()))}
