"""Agreement of all ranks on the checkpoint from which they go on."""

from __future__ import annotations

import zipfile
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_sdpipe.checkpoints.distributed import REST, is_distributed
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.p2p import broadcast_value, waiting_for
from lightning_sdpipe.topology.groups import ProcessGroups


def agree_on(path: Any, groups: ProcessGroups) -> Any:
    """Return ``path``, that of a checkpoint, or None, if the other ranks have the same contents, perhaps elsewhere;
    every rank must call this function.

    Raises:
        ConfigurationError: other ranks have other contents, or none; on all ranks.
    """
    mine = _digest(path)
    extremes = torch.tensor([mine, -mine])
    with waiting_for(groups.world, "comparing checkpoints"):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=groups.world)
    if extremes.sum() == 0:
        return path
    said = _described(path, mine)
    every = [broadcast_value(said, rank, groups.world) for rank in range(dist.get_world_size())]
    alike = {said: [rank for rank, own in enumerate(every) if own == said] for said in every}
    found = "; ".join(f"ranks {ranks}: {said}" for said, ranks in alike.items())
    raise ConfigurationError(
        f"The ranks would go on from unlike checkpoints: {found}. Give all ranks the same one, on a file system that "
        "all machines see, or as a copy on each. Rank 0 alone writes it, so ckpt_path='last' finds others, or none, on "
        "the disks of other machines."
    )


def _digest(path: Any) -> int:
    """Return a number of the contents of the checkpoint at ``path``; 0 if there is none."""
    if not path:
        return 0
    place = _file(path)
    try:
        with get_filesystem(place).open(place, "rb") as file:
            try:
                contents: Any = [(entry.filename, entry.CRC) for entry in zipfile.ZipFile(file).infolist()]
            except zipfile.BadZipFile:
                file.seek(0)
                contents = crc32(file.read())
    except OSError:
        return 0
    return crc32(repr(contents).encode()) or 1


def _file(path: Any) -> str:
    return f"{path}/{REST}" if is_distributed(path) else str(path)


def _described(path: Any, digest: int) -> str:
    if not path:
        return "none"
    if not digest:
        return f"none at {path}"
    try:
        with get_filesystem(path).open(_file(path), "rb") as file:
            checkpoint = torch.load(file, map_location="meta", weights_only=True)
        return f"{path} (epoch {checkpoint['epoch']}, step {checkpoint['global_step']}, contents {digest:x})"
    except Exception:  # what is wrong with it is said when it is loaded, if it is
        return f"{path} (contents {digest:x})"
