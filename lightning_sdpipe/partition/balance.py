"""Cutting a chain so that the slowest stage is as fast as possible.

In a pipeline the slowest stage sets the pace of all. Dynamic programming over the number of stages and the
blocks that they cover finds the cut with the least maximum (as in PipeDream's planner, SOSP 2019, section
3.1, without replication).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from lightning_sdpipe.errors import ConfigurationError


def balance(
    seconds: Sequence[float], crossing: Sequence[float], speeds: Sequence[float]
) -> tuple[tuple[range, ...], float]:
    """The consecutive spans of blocks that minimise the time of the slowest stage.

    A stage's time is that of its blocks divided by its speed, plus the transfers over the cuts at both its
    ends: what a stage takes for one micro-batch if its transfers overlap with nothing.

    Args:
        seconds: forward and backward time of each of the n blocks, on a device of speed 1.
        crossing: seconds to send the activations of each of the n − 1 cuts down and their gradients up;
            infinite where the chain cannot be cut.
        speeds: relative speed of each stage's device; as many as there are stages, M.

    Returns:
        M non-empty spans that cover the chain, and the slowest stage's seconds. Equally good cuts are decided
        by the first, so all ranks find the same one. Takes O(M n²) time and O(M n) memory.

    Raises:
        ConfigurationError: more stages than blocks, a speed that is not positive, or no cut is possible.
    """
    n, m = len(seconds), len(speeds)
    if m > n or any(not (math.isfinite(s) and s > 0) for s in speeds):
        raise ConfigurationError(
            f"{n} blocks cannot be cut into {m} stages of speeds {list(speeds)}. "
            f"Use at most {n} stages, and positive speeds, one for each stage."
        )
    until = list(accumulate(seconds, initial=0.0))
    cost = [0.0, *crossing, 0.0]  # of a stage that begins or ends before block i

    def time(start: int, end: int, speed: float) -> float:
        return cost[start] + (until[end] - until[start]) / speed + cost[end]

    slowest = [[math.inf] * (n + 1) for _ in range(m + 1)]  # [j][end]: stages 0..j−1 cover blocks 0..end−1
    begins = [[0] * (n + 1) for _ in range(m + 1)]
    slowest[0][0] = 0.0
    for j in range(1, m + 1):
        for end in range(j, n - (m - j) + 1):
            for start in range(j - 1, end):
                candidate = max(slowest[j - 1][start], time(start, end, speeds[j - 1]))
                if candidate < slowest[j][end]:
                    slowest[j][end], begins[j][end] = candidate, start
    if math.isinf(slowest[m][n]):
        raise ConfigurationError(
            f"The chain of {n} blocks cannot be cut into {m} stages: too many of its blocks return "
            "something that "
            "cannot travel between stages. Use fewer stages, or name other blocks with "
            "SDPipeStrategy(blocks=[...])."
        )
    spans: list[range] = []
    end = n
    for j in range(m, 0, -1):
        spans.append(range(begins[j][end], end))
        end = begins[j][end]
    return tuple(reversed(spans)), slowest[m][n]
