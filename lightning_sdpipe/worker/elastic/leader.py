"""What the leader's pipeline does for all: its rank 0 logs, and writes checkpoints. When the leader is gone, the next
one goes on where it wrote."""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.loggers.csv_logs import CSVLogger as FabricCSVLogger
from lightning.fabric.utilities import rank_zero as lightning_rank_zero
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning_utilities.core.rank_zero import rank_zero_only as of_everybody

from lightning_sdpipe import lightning_internals

_NOT_ZERO = 10**6


def take_place(rank: int, leads: bool) -> None:
    """Says to all that asks for rank zero whether this process, of that rank in its pipeline, is the one."""
    said: Any = lightning_rank_zero.rank_zero_only
    everywhere: Any = of_everybody
    said.rank = everywhere.rank = rank if leads else rank + _NOT_ZERO


def names(trainer: Trainer) -> dict[str, list[Any]]:
    """Where ``trainer`` writes, for those that will have to go on there."""
    return {
        "versions": [_version(logger) for logger in trainer.loggers],
        "directories": [_directory(callback) for callback in _saving(trainer)],
    }


def adopt(trainer: Trainer, found: dict[str, list[Any]]) -> None:
    """``trainer`` is to write where the leader does, if ever."""
    for logger, version in zip(trainer.loggers, found["versions"], strict=False):
        if version is not None:
            lightning_internals.set_version(logger, version)
    for callback, directory in zip(_saving(trainer), found["directories"], strict=False):
        if directory is not None:
            callback.dirpath = directory


def go_on(trainer: Trainer) -> None:
    """This process writes from now on, into files that another one has begun."""
    for logger in trainer.loggers:
        if isinstance(logger, FabricCSVLogger) and not lightning_internals.has_writer(logger):
            lightning_internals.set_writer(logger, _appending(logger.log_dir))


def show_progress(trainer: Trainer, underway: bool) -> None:
    """The progress bar is this process's; Lightning has switched it off where nobody was rank zero. ``underway``: the
    training has begun, and the bar has not heard of it."""
    bar = trainer.progress_bar_callback
    if bar is not None:
        bar.enable()
        if underway:
            bar.on_train_start(trainer, trainer.lightning_module)
            bar.on_train_epoch_start(trainer, trainer.lightning_module)


def _version(logger: Any) -> int | str | None:
    version = lightning_internals.known_version(logger)
    return version if isinstance(version, int | str) else None


def _directory(callback: ModelCheckpoint) -> str | None:
    return None if callback.dirpath is None else str(callback.dirpath)


def _saving(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


class _Appending(ExperimentWriter):
    """Lightning's own would delete the rows that are there."""

    def _check_log_dir_exists(self) -> None:
        """They are to stay."""


def _appending(directory: str) -> ExperimentWriter:
    writer = _Appending(directory)
    if os.path.exists(writer.metrics_file_path):
        with open(writer.metrics_file_path) as file:
            writer.metrics_keys = file.readline().strip().split(",")
    return writer
