"""Numbers that all workers share, and stand-ins for inputs that some stages do not read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def shared_seed() -> int:
    """Draw a seed from rank 0's generator and return it on all ranks; every rank must call this function."""
    return shared(torch.initial_seed() % 2**62)


def shared(number: int) -> int:
    """Return rank 0's number on all ranks; every rank must call this function."""
    first = torch.tensor(number)
    dist.broadcast(first, 0)
    return int(first)


def stand_in(shape: Sequence[int]) -> Tensor:
    """Return a tensor that a loader may give, without reading the data, in place of inputs that this stage does not
    use.

    Its float32 values are nan, which exposes a stage that computes with them; it takes no memory.
    """
    return torch.full((), torch.nan).expand(*shape)
