"""The best arrangement of given groups: their order as stages, and the device that follows each device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from lightning_sdpipe.placement.cost import Stages, Weights, evaluate
from lightning_sdpipe.placement.matching import bottleneck, shortest_path
from lightning_sdpipe.placement.network import Matrix

PACES = 8
"""How often the largest period is lowered."""


def arrange(groups: Sequence[Sequence[int]], weights: Weights) -> Iterator[Stages]:
    """Yield ever better arrangements of the groups of a placement. They keep their members; where stages are not all
    alike, they keep their places too.

    Without periods (``"dtfm"``) and with even stages the outcome is DT-FM's equations 3 and 4, exactly, up to
    :data:`~lightning_sdpipe.placement.matching.EXACT_PATH` stages. With periods, the largest is then lowered as long as
    that pays.

    Args:
        groups: the groups of M stages.
        weights: the weights of M stages.
    """
    # the slowest of all cuts counts for its period, but which is unknown, so all periods are lowered at first
    costs = [_sum(step, period) for step, period in zip(weights.step, weights.period, strict=True)]
    found = _linked(groups, costs, weights, math.inf)
    least = math.inf
    for _ in range(PACES):
        if found is None:
            return
        yield found
        total = evaluate(found, weights).total
        pace = _pace(found, weights)
        if total >= least or pace == 0.0:
            return
        if least < math.inf:
            pace = math.nextafter(pace, 0.0)
        least = total
        found = _linked(found, weights.step, weights, pace)


def _linked(groups: Sequence[Sequence[int]], costs: Sequence[Matrix], weights: Weights, limit: float) -> Stages | None:
    """Return the arrangement with the least sum over cuts of the largest cost, among links of a period up to
    ``limit``; None if there is none."""
    size = len(groups)
    if size == 1:
        return [list(groups[0])]
    if not weights.even:
        stages = [list(groups[0])]
        for group, cost, period in zip(groups[1:], costs, weights.period, strict=True):
            least, follower = bottleneck(_between(stages[-1], group, cost, period, limit))
            if least == math.inf:
                return None
            stages.append([group[position] for position in follower])
        return stages
    lengths = [[math.inf] * size for _ in range(size)]
    for a in range(size):
        for b in range(a):
            lengths[a][b], _ = bottleneck(_between(groups[a], groups[b], costs[0], weights.period[0], limit))
            lengths[b][a] = lengths[a][b]
    length, order = shortest_path(lengths)
    if length == math.inf:
        return None
    stages = [list(groups[order[0]])]
    for following in order[1:]:
        group = groups[following]
        _, follower = bottleneck(_between(stages[-1], group, costs[0], weights.period[0], limit))
        stages.append([group[position] for position in follower])
    return stages


def _between(above: Sequence[int], below: Sequence[int], cost: Matrix, period: Matrix, limit: float) -> Matrix:
    if limit == math.inf:
        return [[cost[a][b] for b in below] for a in above]
    return [[cost[a][b] if period[a][b] <= limit else math.inf for b in below] for a in above]


def _pace(stages: Stages, weights: Weights) -> float:
    """Return the largest period of a link in use."""
    return max(
        (
            period[a][b]
            for (above, below), period in zip(pairwise(stages), weights.period, strict=True)
            for a, b in zip(above, below, strict=True)
        ),
        default=0.0,
    )


def _sum(first: Matrix, second: Matrix) -> Matrix:
    return [[a + b for a, b in zip(row, other, strict=True)] for row, other in zip(first, second, strict=True)]
