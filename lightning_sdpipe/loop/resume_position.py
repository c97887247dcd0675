"""The split of the data by which batches are counted, and whether a run may go on within an epoch of another run."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer

from lightning_sdpipe.data.shards import takes_turns
from lightning_sdpipe.errors import ConfigurationError

Split = list[int]
"""Number of pipelines, batches of each in an epoch, and samples of a batch (0 if unknown)."""


def split_of(loader: Any, num_pipelines: int) -> Split | None:
    """Return the split of ``loader``, which every pipeline has; None if its length is not known."""
    batches = sized_len(loader)
    return None if batches is None else [num_pipelines, batches, getattr(loader, "batch_size", None) or 0]


def goes_on_in_another(trainer: Trainer, before: Split | None, now: Split | None) -> bool:
    """Return whether the epoch that begins goes on with that of a checkpoint which counts by ``before``, not by
    ``now``."""
    loop = trainer.fit_loop
    return loop.restarted_mid_epoch and not loop.epoch_loop.batch_progress.is_last_batch and before != now


def move_place(trainer: Trainer, before: Split | None, now: Split | None, loader: Any) -> bool:
    """Move ``trainer`` to the place in the split ``now`` where a checkpoint that counts by ``before`` ended. False if
    there is no such place.

    Replica i of N trains samples i, i + N, ... of the epoch's order. So when each of N pipelines has trained b batches
    of B samples, the first b N B samples of that order are done, which are those of b N / N' batches of N' pipelines.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    number = place_in(now, before, progress.ready) if takes_turns(loader) else None
    if number is None:
        return False
    moved = number - progress.ready
    for name in ("ready", "started", "processed", "completed"):  # these may differ, by where the checkpoint was written
        setattr(progress, name, getattr(progress, name) + moved)
    return True


def place_in(now: Split | None, before: Split | None, begun: int) -> int | None:
    """Return how many batches each pipeline of the split ``now`` has begun when each of ``before`` has begun so many;
    None if that is no whole number, or they are of other batches or data."""
    if now is None or before is None or len(before) != 3 or not now[2] or now[2] != before[2]:
        return None
    (n, batches, _), (earlier, earlier_batches, _) = now, before
    if abs(n * batches - earlier * earlier_batches) >= n + earlier:  # more than what is padded, or cut off, differs by
        return None
    return None if begun * earlier % n else begun * earlier // n


def refuse_other_split(before: Split | None, now: Split | None) -> ConfigurationError:
    """Return the error where that cannot be."""
    return ConfigurationError(
        f"The checkpoint is of the middle of an epoch of {_described(before)}, and this run has {_described(now)}, so "
        "it is not known which samples remain. Resume with the same batch size, data and number of pipelines, or one "
        "that divides the batches which are done (of all pipelines together; the loader must have no batch sampler of "
        "your own then), or from the end of an epoch."
    )


def _described(split: Split | None) -> str:
    if split is None:
        return "data that were not counted"
    if len(split) != 3:  # as older checkpoints may have it
        return f"data that another version has counted ({split})"
    pipelines, batches, samples = split
    return f"{pipelines} pipelines × {batches} batches" + (f" of {samples}" if samples else "")
