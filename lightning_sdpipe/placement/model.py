"""What a model needs of devices and links, block by block: enough to place it on a machine without the model."""

from __future__ import annotations

import msgspec


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``count`` consecutive identical blocks of a chain. All figures are for one block and a whole mini-batch of one
    pipeline, on a device of speed 1."""

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
        """All blocks, with repeated ones listed ``count`` times."""
        return tuple(block for block in self.blocks for _ in range(block.count))


def even_stages(num_stages: int, stage_bytes: float, cut_bytes: float) -> tuple[Block, ...]:
    """Return identical stages, each as one block.

    Args:
        num_stages: M.
        stage_bytes: bytes of parameters that the replicas of each stage average (DT-FM's c_dp).
        cut_bytes: bytes of activations over each cut (c_pp, for a mini-batch of one pipeline). As many come back.
    """
    return (Block(0.0, round(stage_bytes), round(cut_bytes), round(cut_bytes)),) * num_stages
