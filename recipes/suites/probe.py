"""Probes a training's workers: what each has used after every mini-batch, and when its epochs began."""

from __future__ import annotations

import ctypes
import gc
import json
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.heterogeneity import DelayInjector, Delays

MIB = 1 << 20
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class Used(NamedTuple):
    """What a worker has used so far, in seconds unless noted."""

    clock: float
    processor: float
    computed: float = 0.0
    injected: float = 0.0
    waiting: float = 0.0  # for its group
    averaging: float = 0.0
    groups: float = 0.0  # number of groups
    members: float = 0.0  # number of members of all groups together
    sent: float = 0.0  # bytes sent to other pipelines


@dataclass
class Report:
    """The report of one worker.

    Args:
        stage: its stage.
        pipeline: its pipeline.
        readings: a reading after each mini-batch.
        starts: when each epoch began, and when training ended.
        peak: the largest rise of the resident memory in bytes, if asked for.
    """

    stage: int = 0
    pipeline: int = 0
    readings: list[Used] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    peak: int = 0

    def used(self, warm_up: int) -> Used:
        """Return what the mini-batches after the first ``warm_up`` used."""
        first, last = self.readings[warm_up - 1], self.readings[-1]
        return Used(*(now - then for now, then in zip(last, first, strict=True)))


class Probe(L.Callback):
    """Writes a report of each worker into a directory when training ends.

    Args:
        directory: directory for the files.
        delays: for Lightning's DDP: delays of its workers, each a pipeline of one stage, before each mini-batch.
        compute_seconds: for Lightning's DDP: emulated seconds of a mini-batch.
        memory: whether to report the peak of the resident memory, too.
    """

    def __init__(
        self, directory: Path, delays: Delays | None = None, compute_seconds: float = 0.0, memory: bool = False
    ) -> None:
        self._directory, self._delays, self._memory = directory, delays, memory
        self._compute_seconds = compute_seconds
        self._injector: DelayInjector | None = None
        self.report = Report()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._memory:
            self._before = reset_peak()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.report.starts.append(time.perf_counter())

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._delays is not None:
            rank = trainer.global_rank
            self._injector = self._injector or DelayInjector(self._delays, 0, rank, rank)
            self._injector.before_forward(batch_idx)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        now, strategy = time.perf_counter(), trainer.strategy
        if isinstance(strategy, SDPipeStrategy):
            found = strategy.statistics
            more = (found.seconds_waiting, found.seconds_averaging, found.groups, found.members, found.bytes_sent)
            used = used_now(now, strategy.injector)._replace(**dict(zip(Used._fields[4:], more, strict=True)))
        else:
            count = len(self.report.readings) + 1
            used = used_now(now, self._injector)._replace(
                computed=count * self._compute_seconds, groups=count, members=count * trainer.world_size
            )
        self.report.readings.append(used)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.report.starts.append(time.perf_counter())
        if self._memory:
            self.report.peak = resident("VmHWM") - self._before
        strategy, rank = trainer.strategy, trainer.global_rank
        place = strategy.mesh.locate(rank) if isinstance(strategy, SDPipeStrategy) else (0, rank)
        self.report.stage, self.report.pipeline = place
        (self._directory / f"{rank}.json").write_text(json.dumps(asdict(self.report)))


def used_now(clock: float, injector: DelayInjector | None) -> Used:
    """Return what this process has used, as far as the process and its injector know."""
    seconds = (injector.computed_seconds, injector.injected_seconds) if injector else ()
    return Used(clock, time.process_time(), *seconds)


def read_reports(directory: Path) -> list[Report]:
    """Return what the probes of a training wrote, by rank."""
    files = sorted(directory.glob("*.json"), key=lambda file: int(file.stem))
    reports = [Report(**json.loads(file.read_text())) for file in files]
    for report in reports:
        report.readings = [Used(*reading) for reading in report.readings]
    return reports


def reset_peak() -> int:
    """Reset the kernel's peak of this process; return its resident bytes.

    The allocator must return freed tensors at once, else the peak would include its reserve.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, MIB)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(name: str) -> int:
    """Return the field ``name`` of ``/proc/self/status`` in bytes."""
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024
