"""What workers have in common of their data: numbers, and stand-ins for inputs that some leave unread."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def shared_seed() -> int:
    """A seed that all ranks share, from rank 0's generator; every rank must call it."""
    return shared(torch.initial_seed() % 2**62)


def shared(number: int) -> int:
    """Rank 0's number, on all ranks; every rank must call it."""
    first = torch.tensor(number)
    dist.broadcast(first, 0)
    return int(first)


def stand_in(shape: Sequence[int]) -> Tensor:
    """What a loader may give, without reading the data, for inputs that this worker's stage does not compute with.

    Its float32 values are not numbers, so that a stage that does compute with them is noticed; it takes no memory.
    """
    return torch.full((), torch.nan).expand(*shape)
