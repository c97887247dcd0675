"""The best matching between two neighbouring stages, and the best order of stages.

Both are exact up to :data:`EXACT_PATH` stages: DT-FM's equation 3 is a bottleneck matching, its equation 4 an open
travelling salesman's path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from lightning_sdpipe.placement.network import Matrix

EXACT_PATH = 12
"""Largest number of stages for which the shortest path is found by dynamic programming, in O(2^M M²) time."""

LEAST_GAIN = 1e-12
"""Largest gain that counts as rounding."""


def bottleneck(costs: Sequence[Sequence[float]]) -> tuple[float, list[int]]:
    """Find the perfect matching of rows and columns whose largest cost is smallest.

    Edges are admitted by increasing cost; at each threshold the rows without a column look for augmenting paths.

    Args:
        costs: n × n; infinite where two may not be matched.

    Returns:
        The largest cost, and the column of each row. If there is no matching, the cost is infinite, and the columns are
        arbitrary.
    """
    size = len(costs)
    least = max(max(map(min, costs)), max(map(min, zip(*costs, strict=True))))
    admitted = [0] * size  # columns of each row, as bits
    later = []
    for row, line in enumerate(costs):
        for column, cost in enumerate(line):
            if cost <= least:
                admitted[row] |= 1 << column
            else:
                later.append((cost, row, column))
    later.sort(reverse=True)
    row_of = [-1] * size  # of each column
    free = [row for row in range(size) if not _augment(row, admitted, row_of)]
    while free:
        least = later[-1][0]
        while later and later[-1][0] == least:
            _, row, column = later.pop()
            admitted[row] |= 1 << column
        free = [row for row in free if not _augment(row, admitted, row_of)]
    column_of = [0] * size
    for column, row in enumerate(row_of):
        column_of[row] = column
    return least, column_of


def _augment(start: int, admitted: Sequence[int], row_of: list[int]) -> bool:
    """Find a column for row ``start``, moving other rows to other columns where needed (depth first)."""
    unseen = (1 << len(row_of)) - 1
    path = [start]  # of rows; came_by[k] is the column by which path[k + 1] was reached
    came_by: list[int] = []
    while path:
        choices = admitted[path[-1]] & unseen
        if not choices:
            path.pop()
            if came_by:
                came_by.pop()
            continue
        lowest = choices & -choices
        unseen ^= lowest
        column = lowest.bit_length() - 1
        came_by.append(column)
        if row_of[column] < 0:
            for row, taken in zip(path, came_by, strict=True):
                row_of[taken] = row
            return True
        path.append(row_of[column])
    return False


def shortest_path(costs: Matrix) -> tuple[float, list[int]]:
    """Find the order of all nodes with the smallest sum of costs between neighbours, and that sum.

    The result is exact up to :data:`EXACT_PATH` nodes; beyond that it is the path of nearest neighbours, improved by
    reversing parts until nothing helps. Node numbers decide between equally good orders.

    Args:
        costs: n × n, symmetric.
    """
    size = len(costs)
    if size <= EXACT_PATH:
        return _held_karp(costs)
    starts = range(0, size, max(1, size * size // 64))  # fewer, as each takes longer
    orders = [_improved(_nearest_neighbours(costs, start), costs) for start in starts]
    return min((_length(order, costs), order) for order in orders)


def _held_karp(costs: Matrix) -> tuple[float, list[int]]:
    size = len(costs)
    everything = (1 << size) - 1
    lengths = [[math.inf] * size for _ in range(1 << size)]  # of the shortest path over a set that ends with a node
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
