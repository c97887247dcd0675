"""Demands of a model on devices and links, block by block: enough to place it on a machine that does not have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lightning_sdpipe.errors import ConfigurationError


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``count`` consecutive blocks of a chain that are alike. All figures are of one block, and of a whole mini-batch
    of one pipeline, on a device of speed 1."""

    seconds: float  # forward and backward
    parameter_bytes: int
    activation_bytes: int | None  # over a cut after it; None if its output cannot travel
    gradient_bytes: int  # bytes that come back over that cut
    trained_bytes: int | None = None  # part of the parameters that is trained; None for all
    saved_bytes: int = 0  # held from its forward to its backward
    count: int = 1


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The chain of blocks of a model."""

    name: str
    blocks: tuple[Block, ...]

    @property
    def chain(self) -> tuple[Block, ...]:
        """All blocks, each once."""
        return tuple(block for block in self.blocks for _ in range(block.count))


@dataclass(frozen=True)
class StageTraffic:
    """The traffic of M stages, for a mini-batch of one pipeline.

    Args:
        stage_bytes: M numbers of bytes: the parameters that the replicas of each stage average (DT-FM's c_dp).
        cut_bytes: M − 1 numbers of bytes: the activations over each cut (c_pp, of the whole mini-batch). As much comes
            back.

    Raises:
        ConfigurationError: the numbers are not M and M − 1, or one is below 0.
    """

    stage_bytes: tuple[float, ...]
    cut_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.cut_bytes) != len(self.stage_bytes) - 1:
            raise ConfigurationError(
                f"{len(self.stage_bytes)} stages have {len(self.stage_bytes) - 1} cuts between them."
            )
        if not all(0 <= amount < float("inf") for amount in (*self.stage_bytes, *self.cut_bytes)):
            raise ConfigurationError(f"Bytes must be finite and at least 0; given {self}.")

    @classmethod
    def even(cls, num_stages: int, stage_bytes: float, cut_bytes: float) -> StageTraffic:
        """Make equal traffic for every stage and cut."""
        return cls((stage_bytes,) * num_stages, (cut_bytes,) * (num_stages - 1))


def traffic_of(chain: Sequence[Block], spans: Sequence[range]) -> StageTraffic:
    """Return the traffic of the stages when stage j runs the blocks of ``spans[j]``.

    Raises:
        ConfigurationError: a cut is after a block whose output cannot travel.
    """
    cuts = []
    for span in spans[:-1]:
        last = chain[span[-1]]
        if last.activation_bytes is None:
            raise ConfigurationError(f"The output of block {span[-1]} cannot travel, so no stage may end with it.")
        cuts.append((last.activation_bytes + last.gradient_bytes) / 2)
    stages = [float(sum(chain[block].parameter_bytes for block in span)) for span in spans]
    return StageTraffic(tuple(stages), tuple(cuts))
