"""Demands of a model on devices and links, block by block: enough to place it on a machine that does not have it."""

from __future__ import annotations

from collections.abc import Sequence

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


def even_stages(num_stages: int, stage_bytes: float, cut_bytes: float) -> tuple[Block, ...]:
    """Return stages that are all alike, each as a block.

    Args:
        num_stages: M.
        stage_bytes: bytes of parameters that the replicas of each stage average (DT-FM's c_dp).
        cut_bytes: bytes of activations over each cut (c_pp, of a whole mini-batch of one pipeline). As much comes back.
    """
    return (Block(0.0, round(stage_bytes), round(cut_bytes), round(cut_bytes)),) * num_stages


def stages_of(chain: Sequence[Block], spans: Sequence[range]) -> list[Block]:
    """Return each stage as a block, when stage j runs the blocks of ``spans[j]``.

    Raises:
        ConfigurationError: a cut is after a block whose output cannot travel.
    """
    stages = []
    for span in spans:
        blocks = chain[span.start : span.stop]
        if span is not spans[-1] and blocks[-1].activation_bytes is None:
            raise ConfigurationError(f"The output of block {span[-1]} cannot travel, so no stage may end with it.")
        seconds, held = sum(block.seconds for block in blocks), sum(block.parameter_bytes for block in blocks)
        stages.append(Block(seconds, held, blocks[-1].activation_bytes, blocks[-1].gradient_bytes))
    return stages
