"""Agreement of all ranks, and of the pipelines of an elastic run, on the checkpoint from which they go on."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from io import BytesIO
from typing import Any, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_sdpipe.checkpoints.distributed import REST, is_distributed
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.p2p import broadcast_value, same
from lightning_sdpipe.topology.groups import ProcessGroups


def agree_on(path: Any, groups: ProcessGroups) -> Any:
    """Return ``path``, that of a checkpoint, or None, if the other ranks have the same contents, perhaps elsewhere;
    every rank must call this function.

    Raises:
        ConfigurationError: ranks have different contents, or some have none; raised on all ranks.
    """
    mine = digest(path)
    if same(mine, groups.world, "comparing checkpoints"):
        return path
    said = described(path, mine)
    refuse_unlike("ranks", {rank: broadcast_value(said, rank, groups.world) for rank in range(dist.get_world_size())})


def refuse_unlike(members: str, every: Mapping[int, str]) -> NoReturn:
    """Raise ConfigurationError that names the checkpoints of ``members`` (ranks or pipelines), as :func:`described`
    does."""
    alike = {said: [number for number, own in every.items() if own == said] for said in every.values()}
    found = "; ".join(f"{members} {numbers}: {said}" for said, numbers in alike.items())
    raise ConfigurationError(
        f"The {members} would continue from different checkpoints: {found}. Give all {members} the same one, on a file "
        "system that all machines see, or as a copy on each. Only rank 0 writes checkpoints, so ckpt_path='last' finds "
        "other ones, or none, on the disks of other machines."
    )


def digest(path: Any) -> int:
    """Return a checksum of the checkpoint at ``path``; 0 if there is none."""
    if not path:
        return 0
    try:
        with _opened(path) as file:
            try:
                contents: Any = [(entry.filename, entry.CRC) for entry in zipfile.ZipFile(file).infolist()]
            except zipfile.BadZipFile:
                file.seek(0)
                contents = crc32(file.read())
    except OSError:
        return 0
    return crc32(repr(contents).encode()) or 1


def _opened(path: Any) -> Any:
    place = f"{path}/{REST}" if is_distributed(path) else str(path)
    files = get_filesystem(place)
    # as Lightning reads it: not every server gives a part of a file
    return BytesIO(files.cat_file(place)) if place.startswith("http") else files.open(place, "rb")


def described(path: Any, digest: int) -> str:
    """Describe the checkpoint at ``path``, whose contents have this ``digest``; it is 0 if there is none."""
    if not path:
        return "none"
    if not digest:
        return f"none at {path}"
    try:
        with _opened(path) as file:
            checkpoint = torch.load(file, map_location="meta", weights_only=True)
        return f"{path} (epoch {checkpoint['epoch']}, step {checkpoint['global_step']}, contents {digest:x})"
    except Exception:  # what is wrong with it is said when it is loaded, if it is
        return f"{path} (contents {digest:x})"
