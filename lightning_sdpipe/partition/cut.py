"""Cuts of a chain by numbers of blocks: the consecutive blocks of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_sdpipe.errors import ConfigurationError

Partition = Literal["uniform"] | Sequence[int]


def cut(num_blocks: int, num_stages: int, partition: Partition = "uniform", named: str = "") -> tuple[range, ...]:
    """Return the blocks of each stage, as consecutive ranges that cover the chain.

    Args:
        num_blocks: length of the chain.
        num_stages: M.
        partition: ``"uniform"`` gives every stage the same number of blocks, the first ones one more where the division
            leaves a rest; a list gives the number of blocks of each stage.
        named: the names of the blocks, for messages.

    Raises:
        ConfigurationError: more stages than blocks, or a list that does not add up.
    """
    if num_stages > num_blocks:
        blocks = f"{num_blocks} blocks" if num_blocks > 1 else "only block"
        raise ConfigurationError(
            f"num_stages={num_stages} is more than the model's {blocks}{named and f', {named}'}. Use at most "
            f"{num_blocks}, or name smaller modules in the order in which they run, as in "
            'SDPipeStrategy(blocks=["model.embeddings", "model.layers.*", "model.head"]).'
        )
    if isinstance(partition, str):
        if partition != "uniform":
            raise ConfigurationError(f"partition={partition!r} is not known. Use 'uniform' or a list of block counts.")
        each, more = divmod(num_blocks, num_stages)
        sizes = [each + (stage < more) for stage in range(num_stages)]
    else:
        sizes = list(partition)
        if len(sizes) != num_stages or sum(sizes) != num_blocks or min(sizes) < 1:
            raise ConfigurationError(
                f"partition={sizes} does not cut {num_blocks} blocks into {num_stages} stages. Give {num_stages} "
                f"positive numbers that add up to {num_blocks}{named and f'; the blocks are {named}'}."
            )
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))
