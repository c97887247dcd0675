"""Checkpoint files that appear under their names when they are complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol, get_filesystem
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO


class WholeFiles(TorchCheckpointIO):
    """Lightning's, except that a file on this machine is written beside its place and then renamed. Lightning's own
    may copy it there from the directory for temporary files, and a full disk leaves the beginning of it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Raises what writing raises; then nothing is left of the file, and one that was there before is."""
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(get_filesystem(path)._strip_protocol(str(path)))
        place.parent.mkdir(parents=True, exist_ok=True)
        with appearing(place) as beside, open(beside, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())


def with_whole_files(io: CheckpointIO | None) -> CheckpointIO:
    """``io``; :class:`WholeFiles` if it is none, and within it if it wraps none."""
    if io is None:
        return WholeFiles()
    if isinstance(io, _WrappingCheckpointIO):
        io.checkpoint_io = WholeFiles()  # unless it has one
    return io


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Where to write what becomes ``path`` when all went well, and is removed otherwise."""
    beside = path.with_name(f".{path.name}.writing")
    try:
        yield beside
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Returns when the names in ``path`` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
