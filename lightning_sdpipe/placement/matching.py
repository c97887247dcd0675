"""Finds the best matching between two neighbouring stages (DT-FM's equation 3, a bottleneck matching) and the best
order of stages (equation 4, an open travelling salesman path).

The matching is exact; the order is exact up to :data:`EXACT_PATH` stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from lightning_sdpipe.placement.network import Matrix

EXACT_PATH = 12
"""Largest number of stages for which the shortest path is found by dynamic programming, in O(2^M M²) time."""

LEAST_GAIN = 1e-12
"""Smaller gains count as rounding errors."""


def bottleneck(costs: Sequence[Sequence[float]]) -> tuple[float, list[int]]:
    """Find the perfect matching of rows and columns whose largest cost is smallest.

    Edges are admitted by increasing cost; at each threshold, unmatched rows look for augmenting paths.

    Args:
        costs: n × n; infinite where a row and a column may not be matched.

    Returns:
        The largest cost, and the column of each row. If there is no matching, the cost is infinite, and the columns are
        arbitrary.
    """
    size = len(costs)
    least = max(max(map(min, costs)), max(map(min, zip(*costs, strict=True))))
    limits = iter(sorted({cost for row in costs for cost in row if cost >= least}))
    row_of, limit = [-1] * size, next(limits)

    def augment(row: int, seen: set[int]) -> bool:
        """Find a column for ``row``, moving other rows to other columns where needed (depth first)."""
        for column, cost in enumerate(costs[row]):
            if cost <= limit and column not in seen:
                seen.add(column)
                if row_of[column] < 0 or augment(row_of[column], seen):
                    row_of[column] = row
                    return True
        return False

    free = list(range(size))
    while free := [row for row in free if not augment(row, set())]:
        limit = next(limits)
    return limit, [row_of.index(row) for row in range(size)]


def shortest_path(costs: Matrix) -> tuple[float, list[int]]:
    """Find the smallest sum of costs between neighbours in an order of all nodes, and that order.

    The result is exact up to :data:`EXACT_PATH` nodes; beyond that it is a nearest-neighbour path, improved by
    reversing parts until nothing helps. Node numbers decide between equally good orders.

    Args:
        costs: n × n, symmetric.
    """
    size = len(costs)
    if size <= EXACT_PATH:
        return _held_karp(costs)
    starts = range(0, size, max(1, size * size // 64))  # fewer for larger n, since each takes longer
    orders = [_improved(_nearest_neighbours(costs, start), costs) for start in starts]
    return min((_length(order, costs), order) for order in orders)


def _held_karp(costs: Matrix) -> tuple[float, list[int]]:
    size = len(costs)
    everything = (1 << size) - 1
    lengths = [[math.inf] * size for _ in range(1 << size)]  # of the shortest path through a set of nodes to a last one
    before = [[-1] * size for _ in range(1 << size)]
    for node in range(size):
        lengths[1 << node][node] = 0.0
    for nodes in range(1, everything):
        for last, length in enumerate(lengths[nodes]):
            if length == math.inf:
                continue
            row = costs[last]
            for following in range(size):
                if nodes >> following & 1:
                    continue
                longer = nodes | 1 << following
                if length + row[following] < lengths[longer][following]:
                    lengths[longer][following] = length + row[following]
                    before[longer][following] = last
    last = min(range(size), key=lengths[everything].__getitem__)
    shortest, order, nodes = lengths[everything][last], [], everything
    while last >= 0:
        order.append(last)
        nodes, last = nodes ^ 1 << last, before[nodes][last]
    return shortest, order[::-1]


def _length(order: Sequence[int], costs: Matrix) -> float:
    return sum(costs[a][b] for a, b in pairwise(order))


def _nearest_neighbours(costs: Matrix, start: int) -> list[int]:
    order, left = [start], set(range(len(costs))) - {start}
    while left:
        nearest = min(left, key=lambda node: (costs[order[-1]][node], node))
        order.append(nearest)
        left.remove(nearest)
    return order


def _improved(order: list[int], costs: Matrix) -> list[int]:
    """Reverse parts (2-opt) while that shortens the path."""
    improving = True
    while improving:
        improving = False
        for start in range(len(order)):
            for end in range(start + 2, len(order) + 1):
                other = [*order[:start], *order[start:end][::-1], *order[end:]]
                if _length(other, costs) < _length(order, costs) - LEAST_GAIN:
                    order, improving = other, True
    return order
