"""Finds the best arrangement of given groups: their order as stages, and the device that follows each device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from lightning_sdpipe.placement.matching import bottleneck, shortest_path
from lightning_sdpipe.placement.network import Matrix

Stages: TypeAlias = list[list[int]]
"""A placement: ``stages[j][i]`` is the device that runs stage j of pipeline i."""

PACES = 8
"""Most arrangements that are tried, each with a lower largest period."""


def arrange(
    groups: Sequence[Sequence[int]], steps: Sequence[Matrix], periods: Sequence[Matrix], even: bool
) -> Iterator[Stages]:
    """Yield better and better arrangements of the groups of a placement. Groups keep their members and, unless all
    stages are alike, their places.

    Without periods (``"dtfm"``) and with even stages, the result is the exact optimum of DT-FM's equations 3 and 4, up
    to :data:`~lightning_sdpipe.placement.matching.EXACT_PATH` stages. With periods, the largest is then lowered as long
    as that pays.

    Args:
        groups: the devices of each of M stages.
        steps: for each of the M − 1 cuts, the seconds of each link that add up along a pipeline: n × n and symmetric;
            infinite where there is no link.
        periods: likewise, the seconds of which only the largest counts.
        even: whether all stages are alike, so that they may change places.
    """
    # only the slowest cut's period counts, but which cut that will be is unknown, so at first all periods are added
    costs = [_sum(step, period) for step, period in zip(steps, periods, strict=True)]
    found = _linked(groups, costs, periods, even, math.inf)
    least = math.inf
    for _ in range(PACES):
        if found is None:
            return
        yield found
        paces = [max(row, default=0.0) for row in _links(found, periods)]
        total = max(sum(row) + slowest for row, slowest in zip(_links(found, steps), paces, strict=True))
        pace = max(paces)
        if total >= least or pace == 0.0:
            return
        if least < math.inf:
            pace = math.nextafter(pace, 0.0)
        least = total
        found = _linked(groups, steps, periods, even, pace)


def _linked(
    groups: Sequence[Sequence[int]], costs: Sequence[Matrix], periods: Sequence[Matrix], even: bool, limit: float
) -> Stages | None:
    """Return the arrangement that minimises the sum over cuts of the largest cost, using only links with a period up to
    ``limit``; None if there is none."""
    size, order = len(groups), list(range(len(groups)))
    if even and size > 1:
        lengths = [[math.inf] * size for _ in range(size)]
        for a in range(size):
            for b in range(a):
                between = _between(groups[a], groups[b], costs[0], periods[0], limit)
                lengths[a][b] = lengths[b][a] = bottleneck(between)[0]
        length, order = shortest_path(lengths)
        if length == math.inf:
            return None
    stages = [list(groups[order[0]])]
    for following, cost, period in zip(order[1:], costs, periods, strict=True):
        group = groups[following]
        least, follower = bottleneck(_between(stages[-1], group, cost, period, limit))
        if least == math.inf:
            return None
        stages.append([group[position] for position in follower])
    return stages


def _links(stages: Stages, matrices: Sequence[Matrix]) -> list[list[float]]:
    """Return the matrices' entries for the links in use, by pipeline and by cut."""
    return [
        [matrix[a][b] for (a, b), matrix in zip(pairwise(row), matrices, strict=True)]
        for row in zip(*stages, strict=True)
    ]


def _between(above: Sequence[int], below: Sequence[int], cost: Matrix, period: Matrix, limit: float) -> Matrix:
    if limit == math.inf:
        return [[cost[a][b] for b in below] for a in above]
    return [[cost[a][b] if period[a][b] <= limit else math.inf for b in below] for a in above]


def _sum(first: Matrix, second: Matrix) -> Matrix:
    return [[a + b for a, b in zip(row, other, strict=True)] for row, other in zip(first, second, strict=True)]
