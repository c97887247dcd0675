"""Deciding which stage runs which blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.balance import balance
from lightning_sdpipe.partition.chain import Block, find_blocks
from lightning_sdpipe.partition.cut import cut
from lightning_sdpipe.partition.profile import BlockProfile


@dataclass(frozen=True)
class Balanced:
    """Cut where the slowest stage is fastest, by measured times.

    Args:
        speeds: relative speed of the device of each stage; all equal by default. 0.5 gets about half the
            work.
        bandwidth: bytes per second between neighbouring stages, in either direction.
    """

    speeds: Sequence[float] | None = None
    bandwidth: float = 1e9

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ConfigurationError(f"bandwidth={self.bandwidth} must be positive, in bytes per second.")


Partition = Literal["uniform", "parameters", "balanced"] | Balanced | Sequence[int]
Profile = Sequence[BlockProfile]


@dataclass(frozen=True)
class Plan:
    """The chain of a model and its stages: stage ``j`` runs ``blocks[b] for b in spans[j]``."""

    blocks: tuple[Block, ...]
    spans: tuple[range, ...]

    @property
    def chain(self) -> tuple[str, ...]:
        """The paths of all modules of the blocks, in order."""
        return tuple(path for block in self.blocks for path in block)

    @property
    def module_spans(self) -> tuple[range, ...]:
        """The spans as indices into :attr:`chain`."""
        ends = [0, *accumulate(len(block) for block in self.blocks)]
        return tuple(range(ends[span.start], ends[span.stop]) for span in self.spans)


def plan(
    module: nn.Module,
    num_stages: int,
    partition: Partition = "uniform",
    names: Sequence[str] | None = None,
    measure: Callable[[Sequence[Block]], Profile] | None = None,
) -> Plan:
    """Finds the chain of ``module`` and cuts it into ``num_stages`` stages.

    Args:
        module: its parameters may be on ``meta``.
        num_stages: M.
        partition: ``"uniform"``: equally many blocks. ``"parameters"``: the largest stage has as few
            parameters as possible. ``"balanced"`` or :class:`Balanced`: the slowest stage is as fast as
            possible. A list: the number of blocks of each stage.
        names: of the blocks, as for :func:`~lightning_sdpipe.partition.chain.find_blocks`.
        measure: gives the profile of the blocks; called for ``"balanced"`` only.

    Raises:
        ConfigurationError: the chain cannot be cut so.
    """
    blocks = find_blocks(module, names)
    check(len(blocks), num_stages, partition)
    if partition == "parameters":
        sizes = [float(num_parameters(module, block)) for block in blocks]
        spans, _ = balance(sizes, [0.0] * (len(blocks) - 1), [1.0] * num_stages)
    elif is_measured(partition):
        if measure is None:
            raise ConfigurationError('partition="balanced" needs a batch to measure the blocks with.')
        options = partition if isinstance(partition, Balanced) else Balanced()
        measured = measure(blocks)
        seconds = [block.forward_seconds + block.backward_seconds for block in measured]
        crossing = [transfer_seconds(block, options.bandwidth) for block in measured[:-1]]
        spans, _ = balance(seconds, crossing, options.speeds or [1.0] * num_stages)
    else:
        spans = cut(len(blocks), num_stages, partition)  # type: ignore[arg-type]  # names are dealt with above
    return Plan(blocks, spans)


def is_measured(partition: Partition) -> bool:
    """Whether a batch is needed to cut so."""
    return partition == "balanced" or isinstance(partition, Balanced)


def check(num_blocks: int, num_stages: int, partition: Partition) -> None:
    """Raises ConfigurationError if no batch is needed to see that a chain of ``num_blocks`` cannot be cut
    so."""
    if isinstance(partition, str) and partition not in ("uniform", "parameters", "balanced"):
        raise ConfigurationError(
            f"partition={partition!r} is not known. Use 'uniform', 'parameters', 'balanced', Balanced(...) "
            "or a list "
            "of block counts."
        )
    if isinstance(partition, Balanced) and partition.speeds and len(partition.speeds) != num_stages:
        raise ConfigurationError(
            f"Balanced(speeds={list(partition.speeds)}) names {len(partition.speeds)} devices for num_stages="
            f"{num_stages}. Give one speed for each stage."
        )
    cut(num_blocks, num_stages, "uniform" if isinstance(partition, (str, Balanced)) else partition)


def num_parameters(module: nn.Module, block: Block) -> int:
    """Elements of the parameters of a block, tied ones once."""
    parameters = {id(p): p.numel() for path in block for p in module.get_submodule(path).parameters()}
    return sum(parameters.values())


def transfer_seconds(block: BlockProfile, bandwidth: float) -> float:
    """Time to send a block's output to the next stage and its gradient back; infinite if it cannot travel."""
    if block.activation_bytes is None:
        return math.inf
    return (block.activation_bytes + block.gradient_bytes) / bandwidth
