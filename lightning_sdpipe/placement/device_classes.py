"""Classes of devices that are alike: a placement of classes is a far smaller problem than one of devices."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_sdpipe.placement.cost import Stages, Weights
from lightning_sdpipe.placement.network import Matrix

TOLERANCE = 0.1
"""Largest difference of the link costs of devices of one class, as the root mean square over all other devices: a mean
evens out noise, and a square still sees the one link in fifty to a device of the same host."""

SAME = 1e-9
"""Largest difference that counts as rounding."""


@dataclass(frozen=True)
class Classes:
    """A partition of the devices.

    Args:
        members: devices of each class, in order.
        of_devices: costs of links between devices.
    """

    members: tuple[tuple[int, ...], ...]
    of_devices: Weights

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.members))

    @cached_property
    def weights(self) -> Weights:
        """Costs of links between classes, means over the devices; on the diagonal, links within a class."""
        return _between(self.members, self.of_devices)

    def devices(self, counts: Sequence[Sequence[int]]) -> Stages:
        """Return groups of devices, from the number of members of each class in each group."""
        taken = [iter(members) for members in self.members]
        return [[next(taken[number]) for number, count in enumerate(group) for _ in range(count)] for group in counts]


def identical(weights: Weights) -> Classes:
    """Return classes of devices that can replace each other without any difference."""
    matrices = _logarithms(weights)
    members: list[list[int]] = []
    for device in range(len(weights.exchange[0])):
        for group in members:  # a device that equals one member equals all
            if all(_distance(matrix, device, group[0], SAME) <= SAME for matrix in matrices):
                group.append(device)
                break
        else:
            members.append([device])
    return Classes(tuple(map(tuple, members)), weights)


def alike(weights: Weights) -> Generator[None, None, Classes]:
    """Return classes of devices that differ by up to :data:`TOLERANCE`: complete linkage, the closest first, so that
    any two members of a class differ by no more.

    Yields:
        None in between, so that a caller that is short of time can stop.
    """
    matrices = _logarithms(weights)
    size = len(weights.exchange[0])
    close: dict[tuple[int, int], float] = {}
    for b in range(size):
        for a in range(b):
            distance = max(_distance(matrix, a, b, TOLERANCE) for matrix in matrices)
            if distance <= TOLERANCE:
                close[a, b] = distance
        yield None
    home = list(range(size))
    members = [[device] for device in range(size)]
    for a, b in sorted(close, key=lambda pair: (close[pair], pair)):
        one, other = sorted((home[a], home[b]))
        if one != other and all((min(x, y), max(x, y)) in close for x in members[one] for y in members[other]):
            for device in members[other]:
                home[device] = one
            members[one] += members[other]
            members[other] = []
    return Classes(tuple(tuple(sorted(group)) for group in members if group), weights)


def _logarithms(weights: Weights) -> list[Matrix]:
    found = []
    for matrix in {id(m): m for m in (*weights.exchange, *weights.step, *weights.period)}.values():
        least = SAME * min((value for row in matrix for value in row if value > 0), default=1.0)
        found.append([[math.log(max(value, least)) for value in row] for row in matrix])
    return found


def _distance(matrix: Matrix, a: int, b: int, tolerance: float) -> float:
    """Return the root mean square difference of two devices' links to all others, in logarithms; infinite where it
    exceeds the tolerance."""
    total, count = 0.0, len(matrix) - 2
    for other, (one, two) in enumerate(zip(matrix[a], matrix[b], strict=True)):
        if other not in (a, b):
            total += (one - two) ** 2
            if total > count * tolerance**2:
                return math.inf
    return math.sqrt(total / count) if count else 0.0


def _between(members: Sequence[Sequence[int]], weights: Weights) -> Weights:
    made: dict[int, Matrix] = {}

    def means(matrix: Matrix) -> Matrix:
        if id(matrix) not in made:
            made[id(matrix)] = [[_mean(matrix, one, other) for other in members] for one in members]
        return made[id(matrix)]

    exchange, step, period = (
        tuple(means(matrix) for matrix in matrices) for matrices in (weights.exchange, weights.step, weights.period)
    )
    return Weights(exchange, step, period)


def _mean(matrix: Matrix, one: Sequence[int], other: Sequence[int]) -> float:
    links = [matrix[a][b] for a in one for b in other if a != b]
    return sum(links) / len(links) if links else 0.0
