"""Check whether the stages of a cut fit into the memory of their devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from lightning_sdpipe.errors import ConfigurationError


@dataclass(frozen=True)
class Memory:
    """The memory that blocks take, and that devices have.

    Args:
        available: bytes of each stage's device that training may use.
        fixed: bytes of each block that do not depend on micro-batches in flight: parameters, gradients and optimizer
            state.
        held: bytes that each block's forward keeps for its backward, of one micro-batch.
        in_flight: micro-batches whose backward each stage has still to run, at most.
        weights: bytes of a copy of each block's trained parameters.
        copies: how many such copies each stage keeps (PipeDream's stash).

    Raises:
        ConfigurationError: a device without memory.
    """

    available: Sequence[float]
    fixed: Sequence[float]
    held: Sequence[float]
    in_flight: Sequence[int]
    weights: Sequence[float]
    copies: Sequence[int]

    def __post_init__(self) -> None:
        if any(not amount > 0 for amount in self.available):
            raise ConfigurationError(f"The memory of a device must be above 0 bytes; given {list(self.available)}.")

    @cached_property
    def _totals(self) -> list[list[float]]:
        return [list(accumulate(part, initial=0.0)) for part in (self.fixed, self.held, self.weights)]

    def needed(self, stage: int, start: int, end: int) -> float:
        """Return the bytes that a stage needs for the blocks from ``start`` up to ``end``."""
        fixed, held, weights = (total[end] - total[start] for total in self._totals)
        return fixed + self.in_flight[stage] * held + self.copies[stage] * weights

    def fits(self, stage: int, start: int, end: int) -> bool:
        """Return whether these blocks fit into that stage's device."""
        return self.needed(stage, start, end) <= self.available[stage]

    def overflow(self, spans: Sequence[range]) -> tuple[int, float]:
        """Return the stage that lacks most memory, and how many bytes; negative if all stages fit."""
        lacks = [self.needed(stage, span.start, span.stop) - self.available[stage] for stage, span in enumerate(spans)]
        worst = max(range(len(spans)), key=lacks.__getitem__)
        return worst, lacks[worst]


def shown(amount: float) -> str:
    """Format a number of bytes for people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(amount) >= size:
            return f"{amount / size:.2f} {unit}"
    return f"{amount:.0f} bytes"
