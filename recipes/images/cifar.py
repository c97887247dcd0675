"""CIFAR-10's binary version."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

_RECORD = 1 + 3 * 32 * 32  # a label, and the pixels: all red ones, all green ones, all blue ones


def read_cifar10(file: Path) -> tuple[Tensor, Tensor]:
    """Pictures, uint8 of shape ``(n, 3, 32, 32)``, and labels, int64 of shape ``(n,)``.

    Raises:
        ValueError: the file does not consist of such records.
    """
    data = file.read_bytes()
    if not data or len(data) % _RECORD:
        raise ValueError(f"{file} has {len(data)} bytes, which is no multiple of the {_RECORD} of a CIFAR-10 record")
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, _RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()
