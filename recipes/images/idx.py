"""The IDX format, in which MNIST and Fashion-MNIST are kept."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import torch
from torch import Tensor

_UNSIGNED_BYTES = 0x08


def read_idx(file: Path) -> Tensor:
    """The array in an IDX file of unsigned bytes, packed with gzip or not.

    Layout: two zero bytes, the kind of the numbers, how many dimensions there are, each of these as a big-endian
    32-bit number, and then the numbers.

    Returns:
        A uint8 tensor of the shape that the file gives.

    Raises:
        ValueError: the file is of another format, or is not as long as it says.
    """
    data = file.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    if len(data) < 4 or data[:3] != bytes([0, 0, _UNSIGNED_BYTES]):
        raise ValueError(f"{file} is not an IDX file of unsigned bytes: it starts with {data[:4]!r}")
    start = 4 + 4 * data[3]
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4)]
    if len(data) - start != math.prod(shape):
        raise ValueError(f"{file} holds {len(data) - start} numbers, but says that its shape is {shape}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).view(shape)
