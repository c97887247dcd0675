"""Files appear under their names when they are complete, and whoever fails to write one leaves nothing behind."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.checkpoints.distributed import DistributedWriter
from lightning_sdpipe.checkpoints.files import WholeFiles
from lightning_sdpipe.groups import ProcessGroups
from lightning_sdpipe.mesh import Mesh
from tests.workers import run_workers


def checkpoint(size: int) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.ones(size)}, "epoch": size}


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file may become longer: the kernel refuses it, as where there is no space."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_what_was_there_stays_when_the_disk_is_full(tmp_path: Path) -> None:
    files, path = WholeFiles(), tmp_path / "saved" / "last.ckpt"
    files.save_checkpoint(checkpoint(10), path)
    with disk_of(50_000), pytest.raises((OSError, RuntimeError)):
        files.save_checkpoint(checkpoint(100_000), path)
    assert names(path.parent) == ["last.ckpt"]
    assert files.load_checkpoint(path, weights_only=True)["epoch"] == 10
    files.save_checkpoint(checkpoint(20), path)
    assert files.load_checkpoint(path, weights_only=True)["epoch"] == 20


def test_a_local_address_is_a_path(tmp_path: Path) -> None:
    WholeFiles().save_checkpoint(checkpoint(10), f"file://{tmp_path}/last.ckpt")
    assert names(tmp_path) == ["last.ckpt"]


def test_what_lies_elsewhere_is_written_as_lightning_does() -> None:
    files = WholeFiles()
    files.save_checkpoint(checkpoint(10), "memory://saved/last.ckpt")
    assert files.load_checkpoint("memory://saved/last.ckpt", weights_only=True)["epoch"] == 10
    fsspec.filesystem("memory").rm("/saved", recursive=True)


def test_the_strategy_uses_them_unless_it_is_given_others(tmp_path: Path) -> None:
    own, wrapping = WholeFiles(), AsyncCheckpointIO()
    assert isinstance(SDPipeStrategy().checkpoint_io, WholeFiles)
    assert SDPipeStrategy(checkpoint_io=own).checkpoint_io is own
    strategy = SDPipeStrategy(checkpoint_io=wrapping)
    assert strategy.checkpoint_io is wrapping
    assert isinstance(wrapping.checkpoint_io, WholeFiles)


def _save(rank: int, path: Path, asynchronous: bool) -> list[str]:
    """Saves a checkpoint, and a longer one for which rank 1 has no space: the error of that, and what there is."""
    groups = ProcessGroups.open(Mesh.build(2, 2), timedelta(seconds=20))
    writer = DistributedWriter(groups, asynchronous)

    def save(size: int) -> None:
        parts: dict[str, Tensor] = {f"weight {rank}": torch.ones(size)}
        writer.save({"state_dict": parts, "epoch": size}, path, WholeFiles())
        writer.wait()

    save(10)
    message = ""
    with disk_of(50_000 if rank == 1 else resource.RLIM_INFINITY):
        try:
            save(100_000)
        except BaseException as error:  # as torch's CheckpointException is
            message = type(error).__name__
    torch.distributed.barrier()
    return [message, *names(path.parent)]


@pytest.mark.distributed
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_distributed_checkpoint_that_one_rank_cannot_write(tmp_path: Path, asynchronous: bool) -> None:
    path = tmp_path / "last.ckpt"
    for message, *left in run_workers(2, _save, path, asynchronous):
        assert message
        assert left == ["last.ckpt"]
    assert torch.load(path / "meta.pt")["epoch"] == 10
