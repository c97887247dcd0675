"""Checkpoint files that appear under their names when they are complete."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from glob import escape
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.utils._pytree import tree_leaves

from lightning_sdpipe.errors import NotWrittenError
from lightning_sdpipe.lightning_internals import WrappingCheckpointIO, is_local_path


class Publisher(Protocol):
    """A run several of whose processes write checkpoints, one after another."""

    @property
    def mark(self) -> str:
        """Is in the names of what all of them write."""

    def publish(self, path: Path) -> None:
        """Returns if this process may put what it has written at ``path``.

        Raises:
            WorkerFailedError: another one has taken its place.
        """

    def published(self, path: Path) -> None:
        """It is there."""


class WholeFiles(TorchCheckpointIO):
    """Lightning's, except that a file on this machine is written beside its place and then renamed. Lightning's own
    may copy it there from the directory for temporary files, and a full disk leaves the beginning of it.

    What is beside has a name that no other process uses. With a ``publisher``, a process that was stopped while it
    wrote puts nothing in the place of what its successor has written: it asks before it renames, and its successor has
    removed what it would rename.
    """

    publisher: Publisher | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Nothing is left of a file that is not written, and one that was there before stays.

        Raises:
            NotWrittenError: there is no space for it, or it cannot be written for another reason.
            WorkerFailedError: another process writes checkpoints by now.
        """
        if storage_options is not None or not is_local_path(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(get_filesystem(path)._strip_protocol(str(path)))
        mark = "" if self.publisher is None else self.publisher.mark
        beside = place.with_name(f".{place.name}.{mark}{_own_name()}-{secrets.token_hex(4)}{_BESIDE}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _remove_what_the_dead_left(place, mark)
            with open(beside, "xb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            beside.unlink(missing_ok=True)
            of_the_disk = error if isinstance(error, OSError) else error.__context__  # torch raises another one
            if isinstance(of_the_disk, OSError):
                raise _not_written(place, checkpoint, of_the_disk) from error
            raise
        try:
            if self.publisher is not None:
                self.publisher.publish(place)
                for other in place.parent.glob(f".*.{mark}*{_BESIDE}"):
                    if f".{mark}{_own_name()}-" not in other.name:
                        other.unlink(missing_ok=True)
            os.replace(beside, place)
        finally:
            beside.unlink(missing_ok=True)
        sync_directory(place.parent)
        if self.publisher is not None:
            self.publisher.published(place)


_BESIDE = ".writing"


def _own_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _remove_what_the_dead_left(place: Path, mark: str) -> None:
    """Of this file, written on this machine by processes that were killed."""
    begins = f".{place.name}.{mark}{socket.gethostname()}-"
    for left in place.parent.glob(f"{escape(begins)}*{_BESIDE}"):
        number = left.name.removeprefix(begins).partition("-")[0]
        if number.isdecimal() and not Path("/proc", number).exists() and Path("/proc/self").exists():
            left.unlink(missing_ok=True)


def _not_written(place: Path, checkpoint: Any, error: OSError) -> NotWrittenError:
    tensors = [value for value in tree_leaves(checkpoint) if isinstance(value, torch.Tensor)]
    needed = sum(tensor.nbytes for tensor in tensors)
    directory = next(parent for parent in place.parents if parent.exists())
    free = shutil.disk_usage(directory).free
    return NotWrittenError(
        f"the checkpoint {place} was not written ({error.strerror or error}): its tensors take {needed:,} bytes, and "
        f"{free:,} bytes are free in {directory}. What was there before is whole. Make room, "
        "keep fewer checkpoints (ModelCheckpoint(save_top_k=...)), or write them elsewhere"
    )


def with_whole_files(io: CheckpointIO | None) -> CheckpointIO:
    """``io``; :class:`WholeFiles` if it is none, and within it if it wraps none."""
    if io is None:
        return WholeFiles()
    if isinstance(io, WrappingCheckpointIO):
        io.checkpoint_io = WholeFiles()  # unless it has one
    return io


def whole_files(io: CheckpointIO | None) -> WholeFiles | None:
    """The one that ``io`` is, or wraps."""
    inner = io.checkpoint_io if isinstance(io, WrappingCheckpointIO) else io
    return inner if isinstance(inner, WholeFiles) else None


def sync_directory(path: Path) -> None:
    """Returns when the names in ``path`` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
