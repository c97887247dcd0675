"""Duties of the leader's pipeline for all: its rank 0 logs, and writes checkpoints. When the leader is gone, the next
one goes on where it wrote."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.csv_logs import CSVLogger as FabricCSVLogger
from lightning.fabric.utilities import rank_zero as lightning_rank_zero
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning_utilities.core.rank_zero import rank_zero_only as of_everybody

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.lightning_internals import known_version
from lightning_sdpipe.scheduler.client.membership_client import MembershipClient

_NOT_ZERO = 10**6


def take_place(rank: int, leads: bool) -> None:
    """Set rank zero for all that asks for it: whether this process, of that rank in its pipeline, is the one."""
    said: Any = lightning_rank_zero.rank_zero_only
    everywhere: Any = of_everybody
    said.rank = everywhere.rank = rank if leads else rank + _NOT_ZERO


class Leadership:
    """Tracks whether this process's pipeline leads, and makes the process go on where the leader was when it takes
    over.

    Args:
        rank: that of this process in its pipeline.
        pipeline: number of its pipeline.
    """

    def __init__(self, rank: int, pipeline: int) -> None:
        self._rank, self._pipeline = rank, pipeline
        self._heir: Trainer | None = None  # that of a process which other pipelines led when it began
        self.held = False
        self.say()

    def say(self) -> None:
        """Set rank zero for all that asks for it; repeated when other code has set it otherwise."""
        take_place(self._rank, self.held)

    def take(self, present: Sequence[int]) -> None:
        """Lead from now on if this pipeline is the first of those that are ``present``, and not if it is not."""
        leads = present[:1] == [self._pipeline]
        if leads == self.held:
            return
        self.held = leads
        self.say()
        if leads and self._heir is not None:
            go_on(self._heir)
            show_progress(self._heir, underway=True)

    def begin(self, trainer: Trainer) -> None:
        """Note that ``trainer`` is about to train."""
        if self.held:
            show_progress(trainer, underway=False)
        self._heir = None if self.held else trainer


class LeadersCheckpoints:
    """A :class:`~lightning_sdpipe.checkpoints.files.Publisher` that asks the scheduler before a checkpoint takes its
    place.

    Args:
        line: client of the scheduler.
        trainer: has counted the updates of the checkpoint.
        run: the number of the fit.
    """

    def __init__(self, line: MembershipClient, trainer: Trainer, run: int) -> None:
        self._line, self._update = line, trainer.global_step  # a thread may write while training goes on
        self.mark = f"{run:x}-"

    def publish(self, path: Path) -> None:
        """Ask for leave; see :class:`~lightning_sdpipe.checkpoints.files.Publisher`, as for the next method."""
        self._line.publish(str(path.absolute()), self._update)

    def published(self, path: Path) -> None:
        self._line.published(str(path.absolute()), self._update)


def names(trainer: Trainer) -> dict[str, list[Any]]:
    """Return where ``trainer`` writes, for workers that may have to go on there."""
    return {
        "versions": [v if isinstance(v, int | str) else None for v in map(known_version, trainer.loggers)],
        "directories": [None if each.dirpath is None else str(each.dirpath) for each in _saving(trainer)],
    }


def adopt(trainer: Trainer, found: dict[str, list[Any]]) -> None:
    """Make ``trainer`` write where the leader does, if ever."""
    for logger, version in zip(trainer.loggers, found["versions"], strict=False):
        if version is not None:
            lightning_internals.set_version(logger, version)
    for callback, directory in zip(_saving(trainer), found["directories"], strict=False):
        if directory is not None:
            callback.dirpath = directory


def go_on(trainer: Trainer) -> None:
    """Let this process write from now on, into files that another process has begun."""
    for logger in trainer.loggers:
        if isinstance(logger, FabricCSVLogger) and not lightning_internals.has_writer(logger):
            lightning_internals.set_writer(logger, _appending(logger.log_dir))


def show_progress(trainer: Trainer, underway: bool) -> None:
    """Show the progress bar in this process, where Lightning has switched it off. ``underway``: training has begun, and
    the bar was not told so."""
    bar = trainer.progress_bar_callback
    if bar is not None:
        bar.enable()
        if underway:
            bar.on_train_start(trainer, trainer.lightning_module)
            bar.on_train_epoch_start(trainer, trainer.lightning_module)


def _saving(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


class _Appending(ExperimentWriter):
    """A writer that keeps the rows in its file, which Lightning's own would delete."""

    def _check_log_dir_exists(self) -> None:
        """Keep the files."""


def _appending(directory: str) -> ExperimentWriter:
    writer = _Appending(directory)
    if os.path.exists(writer.metrics_file_path):
        with open(writer.metrics_file_path) as file:
            writer.metrics_keys = file.readline().strip().split(",")
    return writer
