"""Division of long tensors into pieces of whole blocks, so that scratch memory is bounded and stays in the cache.

A message has a header with some 32-bit numbers per block, all first ones before all second ones, and then the codes of
all values. So it does not depend on the length of pieces, which differs between devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

CPU_PIECE = 2**18
"""Elements of a piece on a CPU: starting an operation costs about as much as copying 2¹⁴ of them."""
DEVICE_PIECE = 2**22
"""Elements of a piece on a GPU, where starting an operation costs more."""


class Pieces:
    """The division of a flat tensor, and of tensors that belong to it, into pieces.

    A piece is a matrix with a row for each block; if the last block is shorter, it is a piece of its own.

    Args:
        x: the tensor.
        block: number of elements of a block.
    """

    def __init__(self, x: Tensor, block: int) -> None:
        self._x, self._block = x, block
        self._whole, self._rest = divmod(x.numel(), block)
        self._at_once = max(1, (CPU_PIECE if x.device.type == "cpu" else DEVICE_PIECE) // block)
        full, last = divmod(self._whole, self._at_once)
        self._rows = [self._at_once] * full + [last] * bool(last)

    def of(self, flat: Tensor, width: int) -> list[Tensor]:
        """Return the pieces of a flat tensor that has ``width`` elements for each block; the rest belongs to the
        shorter block."""
        if not self._rest:
            return self._split(flat.view(self._whole, width))
        end = self._whole * width
        return [*self._split(flat[:end].view(self._whole, width)), flat[end:].view(1, -1)]

    def _split(self, rows: Tensor) -> list[Tensor]:
        return [rows] * len(self._rows) if len(self._rows) < 2 else list(torch.split(rows, self._at_once))

    def values(self) -> list[Tensor]:
        """Return the pieces of the tensor itself."""
        return self.of(self._x, self._block)

    def residuals(self, residual: Tensor | None) -> list[Tensor] | list[None]:
        """Return the pieces of a residual of the tensor, or None for each piece if there is no residual."""
        return self.of(residual, self._block) if residual is not None else [None] * (len(self._rows) + bool(self._rest))

    def scratch(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return memory for one piece, in the shape of each of them."""
        width = min(self._block, self._x.numel())
        memory = torch.empty(max(self._rows, default=1), width, dtype=dtype, device=self._x.device)
        shapes = {rows: memory[:rows] for rows in self._rows}
        rest = [memory[:1, : self._rest]] if self._rest else []
        return [*(shapes[rows] for rows in self._rows), *rest]

    def new_header(self, lines: int) -> Tensor:
        """Return an empty float32 header with a column for each block."""
        blocks = self._whole + bool(self._rest)
        return torch.empty(lines, blocks, dtype=torch.float32, device=self._x.device)

    def read_header(self, message: Tensor, lines: int) -> Tensor:
        """Return the header that :func:`write_header` wrote, as a copy: the message may lie at an address that is odd
        for float32."""
        header = self.new_header(lines)
        header.view(-1).view(torch.uint8).copy_(message[: 4 * header.numel()])
        return header


def write_header(header: Tensor, message: Tensor) -> None:
    """Write a header to the beginning of a message."""
    message[: 4 * header.numel()].copy_(header.view(-1).view(torch.uint8))


def num_blocks(n: int, block: int) -> int:
    return -(-n // block)


def add_residual(x: Tensor, residual: Tensor | None, scratch: Tensor) -> Tensor:
    """Return x + residual in float32: ``x`` itself where they are equal, else in ``scratch``."""
    if residual is not None:
        return torch.add(x, residual, out=scratch)
    return x if x.dtype == torch.float32 else scratch.copy_(x)
