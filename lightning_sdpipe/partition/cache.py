"""Profiles on disk, so that a model is measured once for each shape of its input.

They lie under ``$XDG_CACHE_HOME/lightning_sdpipe/profiles``, or under ``~/.cache`` if that is not set.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_sdpipe.partition.chain import Block
from lightning_sdpipe.partition.profile import BlockProfile

FIELDS = tuple(BlockProfile.__dataclass_fields__)
"""What a profile holds; one that another version measured may lack some of it."""


def fingerprint(module: nn.Module, blocks: Sequence[Block], batch: Any, device: torch.device) -> str:
    """A name for what a profile depends on: the modules (class, printed options), the parameters (name,
    shape, dtype, trained or not), the blocks, the input's shapes and dtypes, the device, its threads and the
    version of torch."""
    parts = (
        FIELDS,
        repr(module),
        [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in module.named_parameters()],
        tuple(blocks),
        [(tuple(t.shape), str(t.dtype)) for t in tree_leaves(batch) if isinstance(t, Tensor)],
        device.type,
        platform.node() if device.type == "cpu" else _name(device),
        torch.get_num_threads(),
        torch.__version__,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _name(device: torch.device) -> str:
    names = getattr(torch.get_device_module(device), "get_device_name", None)  # MPS has none
    return device.type if names is None else str(names(device))


def load(key: str) -> tuple[BlockProfile, ...] | None:
    """The profile stored under ``key``; None if there is none that can be read."""
    try:
        return decode(_path(key).read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None


def store(key: str, profile: Sequence[BlockProfile]) -> None:
    """Stores a profile. A reader never sees half of one; a cache that cannot be written is no error."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(encode(profile))
        os.replace(file.name, path)
    except OSError:
        return


def encode(profile: Sequence[BlockProfile]) -> bytes:
    """A profile as JSON: one object for each block, with the fields of :class:`BlockProfile`."""
    return msgspec.json.encode(tuple(profile))


def decode(data: bytes) -> tuple[BlockProfile, ...]:
    """The reverse of :func:`encode`. Raises ``msgspec.MsgspecError`` for anything else."""
    return msgspec.json.decode(data, type=tuple[BlockProfile, ...])


def _path(key: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    root = Path(home) if home else Path.home() / ".cache"
    return root / "lightning_sdpipe" / "profiles" / f"{key}.json"
