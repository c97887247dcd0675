"""Which split of the data batches are counted by, and whether a run may go on within an epoch of another one."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer

from lightning_sdpipe.errors import ConfigurationError

Split = list[int]
"""Pipelines, batches of each in an epoch, and samples of a batch (0 if nobody says)."""


def split_of(loader: Any, num_pipelines: int) -> Split | None:
    """That of ``loader``, which every pipeline has; None if nobody knows its length."""
    batches = sized_len(loader)
    return None if batches is None else [num_pipelines, batches, getattr(loader, "batch_size", None) or 0]


def goes_on_in_another(trainer: Trainer, before: Split | None, now: Split | None) -> bool:
    """Does the epoch that begins go on with that of a checkpoint which counts by ``before``, not by ``now``?"""
    loop = trainer.fit_loop
    return loop.restarted_mid_epoch and not loop.epoch_loop.batch_progress.is_last_batch and before != now


def refuse_other_split(before: Split | None, now: Split | None) -> ConfigurationError:
    """The error where that cannot be."""
    return ConfigurationError(
        f"The checkpoint is of the middle of an epoch of {_described(before)}, and this run has {_described(now)}, so "
        "it is not known which samples remain. Resume with the same number of pipelines, batch size and data, or from "
        "the end of an epoch."
    )


def _described(split: Split | None) -> str:
    if split is None:
        return "data that nobody has counted"
    if len(split) != 3:  # as older checkpoints may have it
        return f"data that another version has counted ({split})"
    pipelines, batches, samples = split
    return f"{pipelines} pipelines × {batches} batches" + (f" of {samples}" if samples else "")
