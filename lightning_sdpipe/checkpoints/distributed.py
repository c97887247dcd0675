"""Distributed checkpoints, of which every rank writes its part with ``torch.distributed.checkpoint``.

A checkpoint is a directory: the parameters once, the optimizer's state once per pipeline, and a file with all else. It
appears under its name when it is complete, so a crash leaves the previous one unchanged. In an elastic run one pipeline
writes, as if there were no other. If it is lost meanwhile, the next one that writes removes what it left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from lightning_sdpipe.checkpoints.files import (
    Publisher,
    beside_it,
    damaged,
    of_predecessors,
    place_of,
    sync_directory,
)
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.lightning_internals import is_local_path
from lightning_sdpipe.p2p import broadcast_value
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.topology.groups import ProcessGroups

REST = "meta.pt"
"""File of all else: Lightning's name for it, so that its functions read such a directory."""
_OPTIMIZER = "optimizer_of_pipeline"
_MODULES = ("state_dict", "current_model_state")
"""States of the module that a checkpoint may have: the second is there if the first is an average over time."""
_OF_MODULES = tuple(f"{kind}." for kind in _MODULES)
_PART = ".part"


def _of(number: int) -> str:
    """Return the kind of the states of optimizer ``number``."""
    return f"{_OPTIMIZER}_{number}" if number else _OPTIMIZER


def is_distributed(path: str | Path) -> bool:
    """Return whether ``path``, which may be an address elsewhere, is a checkpoint that :class:`DistributedWriter`
    wrote."""
    return bool(get_filesystem(path).isfile(f"{path}/{REST}"))


def directory_of(path: Any) -> Path:
    """Return the directory of the distributed checkpoint ``path``.

    Raises:
        ConfigurationError: it is an address elsewhere.
    """
    if not is_local_path(path):
        raise ConfigurationError(
            f"A distributed checkpoint is a directory on a file system that all ranks see, and {path} is not one. "
            "Pass such a directory as ModelCheckpoint(dirpath=...) or ckpt_path, and copy it when it is complete; or "
            "SDPipeStrategy(save_distributed_checkpoint=False), which writes one file, to such an address too."
        )
    return place_of(path)


class DistributedWriter:
    """Writes checkpoints; every rank must make one and call its methods at the same points.

    Args:
        groups: the process groups, which decide what each rank writes.
        asynchronous: :meth:`save` returns when the tensors have been copied; a thread writes them.
    """

    def __init__(self, groups: ProcessGroups, asynchronous: bool) -> None:
        self._groups = groups
        self._asynchronous = asynchronous
        self._group = groups.new_group(None, None, "gloo")  # its own: a thread may use it while training uses others
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def save(
        self, checkpoint: dict[str, Any], path: Path, files: CheckpointIO, publisher: Publisher | None = None
    ) -> None:
        """Write ``checkpoint``, in which the module's states and ``optimizer_states`` are this rank's parts.

        Args:
            checkpoint: loses what goes into the files of the ranks.
            path: its place.
            files: writes the file with all else.
            publisher: is asked on rank 0 before the checkpoint takes its place; None if no other pipeline may have
                begun to write.

        Raises:
            Exception: writing the previous checkpoint failed.
        """
        self.wait()
        states = {kind: checkpoint.pop(kind) for kind in _MODULES if kind in checkpoint}
        parts = {kind: state if self._row == 0 else {} for kind, state in states.items()}
        for number, optimizer in enumerate(checkpoint.get("optimizer_states", ())):
            moments = optimizer["state"]
            optimizer["state"] = {key: moments.pop(key) for key in list(moments) if not isinstance(key, int)}
            parts[_of(number)] = {str(self._row): {str(place): state for place, state in moments.items()}}
        part = path.with_name(f".{path.name}{_PART}") if publisher is None else beside_it(path, publisher.mark, _PART)
        if self._groups.rank == 0:
            _remove(part)
            try:
                files.save_checkpoint(checkpoint, part / REST)
            except BaseException:
                _remove(part)
                raise
        part = Path(broadcast_value(str(part), 0, self._group))  # rank 0 names the place, and clears it first
        if self._asynchronous:
            written = async_save(parts, checkpoint_id=part, process_group=self._group)
            assert isinstance(written, Future)
            self._pending = self._thread.submit(self._finish, written.result, part, path, publisher)
        else:
            self._finish(lambda: save(parts, checkpoint_id=part, process_group=self._group), part, path, publisher)

    @property
    def _row(self) -> int:
        """Number of this rank's pipeline among those that write: the only one of its world in an elastic run."""
        return next(number for number, ranks in enumerate(self._groups.mesh.ranks) if self._groups.rank in ranks)

    def _finish(self, written: Callable[[], object], part: Path, path: Path, publisher: Publisher | None) -> None:
        """Put the checkpoint in place when ``written``, which waits until all ranks have written their parts, has
        returned."""
        first = self._groups.rank == 0
        try:
            written()
            if first and publisher is not None:
                publisher.publish(path)
                for other in of_predecessors(path, publisher.mark, _PART):
                    shutil.rmtree(other, ignore_errors=True)  # a stage of the one that is lost may still write there
        except BaseException:  # as torch's CheckpointException is
            if first:
                _remove(part)
            raise
        if first:
            _put_in_place(part, path)
            if publisher is not None:
                publisher.published(path)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete; raise the exception of writing it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


def _put_in_place(part: Path, path: Path) -> None:
    with replacing(path):
        os.rename(part, path)
    sync_directory(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[None]:
    """Keep the checkpoint at ``path`` while another is put in its place within the context: the old one is removed only
    afterwards, and restored if that fails."""
    old = path.with_name(f".{path.name}.old")
    _remove(old)
    if path.exists():
        os.rename(path, old)
    try:
        yield
    except BaseException:
        if old.exists():
            _remove(path)
            os.rename(old, path)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_part(
    path: Path,
    ownership: Ownership,
    places: Sequence[Container[int]] | None,
    groups: ProcessGroups,
    files: CheckpointIO,
) -> dict[str, Any]:
    """Read the part of the checkpoint in ``path`` that this rank needs; of the rest only the names and shapes.

    Args:
        path: a directory for which :func:`is_distributed` holds.
        ownership: the owners of the parameters.
        places: the places of this stage's parameters in each whole optimizer; None for all of them.
        groups: the process groups of this rank. A run with more pipelines than the saved one reuses their optimizers'
            states in turn.
        files: reads the file with the rest.
    """
    stage, pipeline = groups.mesh.locate(groups.rank)
    metadata = _metadata(path)
    saved = metadata.state_dict_metadata
    pipelines = {key.split(".")[1] for key in saved if not key.startswith(_OF_MODULES)}  # some optimizers have no state
    row = pipeline % max(1, len(pipelines))
    sources = {f"{_of(number)}.{row}": own for number, own in enumerate(places or ())}
    wanted: list[str] = []
    absent: dict[str, dict[str, Any]] = {}
    for key, entry in saved.items():
        kind, _, name = key.partition(".")
        if kind in _MODULES and stage not in ownership.stages.get(name, (stage,)):
            absent.setdefault(kind, {})[name] = _empty(entry, "meta")
        elif kind in _MODULES:
            wanted.append(key)
        else:
            optimizer, of_row, place, *_ = key.split(".")
            if of_row == str(row) and (places is None or int(place) in sources.get(f"{optimizer}.{row}", ())):
                wanted.append(key)
    checkpoint = _read(path, metadata, wanted, files)
    return checkpoint | {kind: others | checkpoint.get(kind, {}) for kind, others in absent.items()}


def read_whole(path: Path, files: CheckpointIO) -> dict[str, Any]:
    """Read the checkpoint in ``path`` as one file would hold it; the optimizer's state is that of the first
    pipeline."""
    metadata = _metadata(path)
    keys = metadata.state_dict_metadata
    wanted = [key for key in keys if key.startswith(_OF_MODULES) or key.split(".")[1] == "0"]
    return _read(path, metadata, wanted, files)


def _metadata(path: Path) -> Metadata:
    try:
        return FileSystemReader(path).read_metadata()
    except (OSError, EOFError, UnpicklingError) as error:
        raise damaged(path) from error


def _read(path: Path, metadata: Metadata, wanted: Sequence[str], files: CheckpointIO) -> dict[str, Any]:
    """Read the ``wanted`` entries into their places in a checkpoint of one pipeline's optimizer.

    Raises:
        ConfigurationError: a file of it was cut off, or is missing.
    """
    values = {key: _empty(metadata.state_dict_metadata[key], "cpu") for key in wanted}
    try:
        load(values, checkpoint_id=path, no_dist=True)
    except CheckpointException as error:
        raise damaged(path) from error
    checkpoint: dict[str, Any] = files.load_checkpoint(path / REST, weights_only=False)
    held = {key: value for key, value in values.items() if key.startswith(_OF_MODULES)}
    nested = unflatten_state_dict(held, {key: metadata.planner_data[key] for key in held})  # extra state may be a dict
    checkpoint |= {"state_dict": {}, **nested}
    for optimizer in checkpoint.get("optimizer_states", ()):
        optimizer.setdefault("state", {})
    by_kind = {_of(number): optimizer for number, optimizer in enumerate(checkpoint.get("optimizer_states", ()))}
    for key, value in values.items():
        if key not in held:
            kind, _, place, name = key.split(".", 3)
            by_kind[kind]["state"].setdefault(int(place), {})[name] = value
    return checkpoint


def _empty(entry: TensorStorageMetadata | BytesStorageMetadata, device: str) -> Tensor | None:
    if isinstance(entry, BytesStorageMetadata):
        return None
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
