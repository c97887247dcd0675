"""Checkpoint files that appear under their names only when they are complete."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import zipfile
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.utils._pytree import tree_leaves

from lightning_sdpipe.errors import ConfigurationError, NotWrittenError
from lightning_sdpipe.lightning_internals import WrappingCheckpointIO, is_local_path
from lightning_sdpipe.scheduler.client.client import SchedulerClient


@dataclass(frozen=True)
class Publisher:
    """Asks the scheduler before a checkpoint takes its place in a run whose leaders write, one after another.

    Args:
        client: client of the scheduler.
        update: number of updates of the checkpoint; a thread may write it while training goes on.
        run: the number of the fit.
    """

    client: SchedulerClient
    update: int
    run: int

    @property
    def mark(self) -> str:
        """Part of the names of all files that these processes write."""
        return f"{self.run:x}-"

    def publish(self, path: Path) -> None:
        """Check that this process may put its file at ``path``.

        Raises:
            WorkerFailedError: another process has taken its place.
        """
        self.client.publish(str(path.absolute()), self.update)

    def published(self, path: Path) -> None:
        """Note that the file is at ``path``."""
        self.client.published(str(path.absolute()), self.update)


class WholeFiles(TorchCheckpointIO):
    """Lightning's plugin, except that a file on this machine is written beside its place and then renamed. Lightning's
    own plugin may copy the file from the directory for temporary files, and a full disk leaves the beginning of it.

    The temporary file has a name that no other process uses. With a ``publisher``, a process that was stopped while it
    wrote does not overwrite the file of its successor: it asks before it renames, and its successor has removed the
    temporary file.
    """

    publisher: Publisher | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the checkpoint. A failure leaves no part of the file, and a previous file stays.

        Raises:
            NotWrittenError: the file cannot be written, for lack of space or another reason.
            WorkerFailedError: another process has taken over writing checkpoints.
        """
        if storage_options is not None or not is_local_path(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = place_of(path)
        mark = "" if self.publisher is None else self.publisher.mark
        beside = beside_it(place, mark, _BESIDE)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _remove_what_the_dead_left(place, mark)
            with open(beside, "xb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            beside.unlink(missing_ok=True)
            of_the_disk = error if isinstance(error, OSError) else error.__context__  # torch raises another exception
            if isinstance(of_the_disk, OSError):
                raise _not_written(place, checkpoint, of_the_disk) from error
            raise
        try:
            if self.publisher is not None:
                self.publisher.publish(place)
                for other in of_predecessors(place, mark, _BESIDE):
                    other.unlink(missing_ok=True)
            os.replace(beside, place)
        finally:
            beside.unlink(missing_ok=True)
        sync_directory(place.parent)
        if self.publisher is not None:
            self.publisher.published(place)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read the checkpoint.

        Raises:
            ConfigurationError: the file was cut off, or is not a checkpoint.
        """
        try:
            return super().load_checkpoint(path, *args, **kwargs)
        except Exception as error:  # torch raises any, most of which name no file
            if is_local_path(path) and place_of(path).is_file() and not zipfile.is_zipfile(place_of(path)):
                raise damaged(path) from error
            raise


def damaged(path: Any) -> ConfigurationError:
    """Return the error for a checkpoint at ``path`` that cannot be read."""
    others = sorted(other.name for other in Path(path).parent.glob("*.ckpt") if other != Path(path))
    return ConfigurationError(
        f"The checkpoint {path} is damaged (perhaps cut off), or is not a checkpoint. Pass another one to "
        f"fit(ckpt_path=...); in its directory there are: {', '.join(others) or 'no others'}."
    )


def place_of(path: Any) -> Path:
    """Return the ``path`` of a file or directory on this machine, which may be given as ``file://...``."""
    return Path(get_filesystem(path)._strip_protocol(str(path)))


_BESIDE = ".writing"


def beside_it(place: Path, mark: str, ending: str) -> Path:
    """Return a path next to ``place`` that no other process uses, and that bears the ``mark`` of the run."""
    return place.with_name(f".{place.name}.{mark}{_own_name()}-{secrets.token_hex(4)}{ending}")


def of_predecessors(place: Path, mark: str, ending: str) -> list[Path]:
    """Return what :func:`beside_it` has named for other processes of the run, in the directory of ``place``."""
    own = f".{mark}{_own_name()}-"
    return [other for other in place.parent.glob(f".*.{mark}*{ending}") if own not in other.name]


def _own_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _remove_what_the_dead_left(place: Path, mark: str) -> None:
    """Remove the temporary files for this file that killed processes on this machine have left."""
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
        f"{free:,} bytes are free in {directory}. An earlier checkpoint at that path is untouched. Make room, "
        "keep fewer checkpoints (ModelCheckpoint(save_top_k=...)), or write them elsewhere"
    )


def with_whole_files(io: CheckpointIO | None) -> CheckpointIO:
    """Return ``io`` with :class:`WholeFiles` inside, if it wraps no other plugin; :class:`WholeFiles` if ``io`` is
    None."""
    if io is None:
        return WholeFiles()
    if isinstance(io, WrappingCheckpointIO):
        io.checkpoint_io = WholeFiles()  # unless it has one
    return io


def whole_files(io: CheckpointIO | None) -> WholeFiles | None:
    """Return the :class:`WholeFiles` that ``io`` is, or wraps; else None."""
    inner = io.checkpoint_io if isinstance(io, WrappingCheckpointIO) else io
    return inner if isinstance(inner, WholeFiles) else None


def sync_directory(path: Path) -> None:
    """Wait until the names in ``path`` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
