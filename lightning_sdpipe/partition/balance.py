"""Cuts of a chain that make the slowest stage as fast as possible.

In a pipeline the slowest stage sets the pace of all. Dynamic programming over the number of stages and the blocks that
they cover finds the cut with the least maximum (as in PipeDream's planner, SOSP 2019, section 3.1, without
replication).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from lightning_sdpipe.errors import ConfigurationError


def balance(
    seconds: Sequence[float],
    crossing: Sequence[float],
    speeds: Sequence[float],
    memory: Memory | None = None,
    slowness: Sequence[float] | None = None,
) -> tuple[tuple[range, ...], float]:
    """Return the consecutive spans of blocks that minimise the time of the slowest stage.

    A stage's time is its blocks' time divided by its speed, plus the transfers over the cuts at both its ends: its time
    for one micro-batch if the transfers overlap with nothing.

    Args:
        seconds: forward and backward time of each of the n blocks, on a device of speed 1.
        crossing: seconds to send the activations of each of the n − 1 cuts down and their gradients up; infinite where
            the chain cannot be cut.
        speeds: relative speed of the device of each of the M stages.
        memory: needs of blocks and capacities of devices; None if everything fits.
        slowness: M − 1 factors of ``crossing``, between each stage and the next; all 1 by default.

    Returns:
        M non-empty spans that cover the chain, and the slowest stage's seconds. Of equally good cuts the first is
        taken, so all ranks find the same one. Takes O(M n²) time and O(M n) memory.

    Raises:
        ConfigurationError: there are more stages than blocks, a speed is not positive, no cut is possible, or a stage
            does not fit into its device whatever the cut.
    """
    n, m = len(seconds), len(speeds)
    if m > n or any(not (math.isfinite(s) and s > 0) for s in speeds):
        raise ConfigurationError(
            f"{n} blocks cannot be cut into {m} stages of speeds {list(speeds)}. "
            f"Use at most {n} stages, and positive speeds, one for each stage."
        )
    until = list(accumulate(seconds, initial=0.0))
    cost = [0.0, *crossing, 0.0]  # of a cut before block i
    link = [1.0, *(slowness or [1.0] * (m - 1)), 1.0]  # before each stage, and after the last

    def time(stage: int, start: int, end: int) -> float:
        if memory is not None and not memory.fits(stage, start, end):
            return math.inf
        return link[stage] * cost[start] + (until[end] - until[start]) / speeds[stage] + link[stage + 1] * cost[end]

    spans, slowest = _least_maximum(n, m, time)
    if not math.isinf(slowest):
        return spans, slowest
    if memory is not None:
        lacking = memory

        def lack(stage: int, start: int, end: int) -> float:
            uncut = math.isinf(cost[start]) or math.isinf(cost[end])
            return math.inf if uncut else lacking.needed(stage, start, end) - lacking.available[stage]

        spans, slowest = _least_maximum(n, m, lack)
    if math.isinf(slowest):
        raise ConfigurationError(
            f"The chain of {n} blocks cannot be cut into {m} stages: too many of its blocks return something that "
            "cannot travel between stages. Use fewer stages, or name other blocks with "
            "SDPipeStrategy(blocks=[...])."
        )
    stage, too_much = lacking.overflow(spans)
    have, span = lacking.available[stage], spans[stage]
    blocks = f"block {span.start}" if len(span) == 1 else f"blocks {span.start} to {span[-1]}"
    raise ConfigurationError(
        f"The model does not fit: however its {n} blocks are cut into {m} stages, one of them needs more memory than "
        f"its device has. At best that is stage {stage} ({blocks}), which needs {shown(have + too_much)} where there "
        f"are {shown(have)}: {shown(too_much)} too much. Use more stages, smaller micro-batches, or devices with more "
        "memory."
    )


CLOSE = 1.1
"""Largest ratio of the slowest stage's time in a more even cut to its time in the fastest cut."""
FAR = 1.3
"""The same ratio if one stage would otherwise hold much more than an even share."""
MUCH = 1.5
"""A stage holds much more than an even share if the ratio of the two exceeds this."""


def even(
    seconds: Sequence[float],
    held: Sequence[float],
    num_stages: int,
    possible: Sequence[bool],
    memory: float = math.inf,
) -> tuple[tuple[range, ...], float]:
    """Return a cut that gives up a little time for stages of more even sizes.

    Among the cuts whose slowest stage takes at most :data:`CLOSE` times as long as the fastest cut's, this takes the
    one whose largest stage is smallest. If that stage still holds much more than an even share, :data:`FAR` is tried as
    well, and taken if it helps. No stage holds more than ``memory`` if that can be avoided.

    Args:
        seconds: time of each of the n blocks.
        held: bytes that a stage needs for each block.
        num_stages: M, at most n.
        possible: whether the chain can be cut at each of its n − 1 cuts.
        memory: bytes of a device.

    Returns:
        M non-empty spans that cover the chain, and the time of the slowest, multiplied by :data:`FAR` if a stage holds
        much more than an even share; infinite if too few cuts are possible.
    """
    until, taken = (list(accumulate(each, initial=0.0)) for each in (seconds, held))
    ends = [True, *possible, True]
    limit = math.inf

    def time(_: int, start: int, end: int) -> float:
        fits = taken[end] - taken[start] <= memory
        return until[end] - until[start] if ends[start] and ends[end] and fits else math.inf

    def size(stage: int, start: int, end: int) -> float:
        allowed = math.isinf(limit) or time(stage, start, end) <= limit
        return taken[end] - taken[start] if ends[start] and ends[end] and allowed else math.inf

    _, least = _least_maximum(len(seconds), num_stages, time)
    rated = []
    for slack in (CLOSE, FAR):
        limit = slack * least
        spans, largest = _least_maximum(len(seconds), num_stages, size)
        slowest = max(until[span.stop] - until[span.start] for span in spans)
        much = largest > MUCH * taken[-1] / num_stages
        rated.append((math.inf if math.isinf(largest) else slowest * (FAR if much else 1.0), spans))
    rating, spans = min(reversed(rated), key=lambda each: each[0])  # of equals, the more even cut
    return spans, rating


def _least_maximum(n: int, m: int, cost: Callable[[int, int, int], float]) -> tuple[tuple[range, ...], float]:
    """Return the m spans of n blocks that minimise the largest ``cost(stage, start, end)``, and that cost; it is
    infinite if there are no such spans."""
    largest = [[math.inf] * (n + 1) for _ in range(m + 1)]  # [j][end]: stages 0..j−1 cover blocks 0..end−1
    begins = [[0] * (n + 1) for _ in range(m + 1)]
    largest[0][0] = -math.inf
    for j in range(1, m + 1):
        for end in range(j, n - (m - j) + 1):
            for start in range(j - 1, end):
                candidate = max(largest[j - 1][start], cost(j - 1, start, end))
                if candidate < largest[j][end]:
                    largest[j][end], begins[j][end] = candidate, start
    spans: list[range] = []
    end = n
    for j in range(m, 0, -1):
        spans.append(range(begins[j][end], end))
        end = begins[j][end]
    return tuple(reversed(spans)), largest[m][n]


@dataclass(frozen=True)
class Memory:
    """The memory that blocks need and that devices have.

    Args:
        available: bytes that training may use on each stage's device.
        fixed: bytes of each block that do not depend on micro-batches in flight: parameters, gradients and optimizer
            state.
        held: bytes that each block's forward keeps for its backward, for one micro-batch.
        in_flight: the largest number of micro-batches whose backward each stage has yet to run.
        weights: bytes of a copy of each block's trained parameters.
        copies: how many such copies each stage keeps (PipeDream's stash).

    Raises:
        ConfigurationError: a device has no memory.
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
        """Return the stage that lacks the most memory, and the bytes that it lacks; negative if all stages fit."""
        lacks = [self.needed(stage, span.start, span.stop) - self.available[stage] for stage, span in enumerate(spans)]
        worst = max(range(len(spans)), key=lacks.__getitem__)
        return worst, lacks[worst]


def shown(amount: float) -> str:
    """Format a number of bytes with its unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(amount) >= size:
            return f"{amount / size:.2f} {unit}"
    return f"{amount:.0f} bytes"
