"""Simulated annealing of a placement, device by device.

The cost is a maximum over links, and annealing a maximum gets stuck: most moves do not change it. So a smooth surrogate
is annealed: over each cut the power mean of its links' steps, over all cuts that of their periods, with a power that
rises from 3 to 24, where it is nearly the maximum; and the data cost, with a small share of every group's.

A move swaps the places of two devices, or reverses consecutive stages. As the slowest links count, most moves take an
end of a cut's slowest link, and often put a device there that is near the other end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterable, Sequence

from lightning_sdpipe.placement.cost import Stages, Weights, evaluate, least_loads
from lightning_sdpipe.placement.network import Matrix

POWERS = (3.0, 6.0, 12.0, 24.0)
WATCHED = 12.0
"""Power from which on every accepted placement is compared with the best one. At lower powers none is as good."""

SHARE = 0.03
"""Share of every group's data cost that counts besides the largest."""

REVERSALS = 0.05
"""Share of moves that reverse stages, if these are all alike."""

SLOWEST_MEMBERS = 0.05
"""Share of moves that take the slowest member of the slowest group."""

SLOWEST_LINKS = 0.85
"""Share of moves that take an end of the slowest link of a cut."""

NEAR = 0.65
"""Share of these that put a device there that is near the other end: of n others the one of rank n u³, with u
uniform."""

CHUNK = 128
"""Number of moves between two yields."""


def anneal(
    stages: Stages,
    weights: Weights,
    near: Sequence[Sequence[int]],
    rng: random.Random,
    moves: int,
    hot: float,
    cold: float,
) -> Generator[None, None, Stages]:
    """Return the best placement met on the way.

    Args:
        stages: the placement to start from.
        weights: finite weights of M stages.
        near: for each device the other devices, the nearest first (:func:`neighbours`).
        rng: source of all randomness.
        moves: number of moves to try.
        hot: first temperature, as a share of the start's cost.
        cold: last temperature, likewise.

    Yields:
        None every :data:`CHUNK` moves, so that a caller that is short of time can stop.
    """
    walk = _Walk(stages, weights, near, rng)
    yield None
    unit = walk.best_cost
    each = moves // len(POWERS)
    for number, power in enumerate(POWERS):
        walk.smooth(power)
        yield None
        for done in range(0, each, CHUNK):
            progress = (number * each + done) / moves
            walk.wander(unit * hot * (cold / hot) ** progress, min(CHUNK, each - done))
            yield None
    return walk.best


class _Walk:
    """A placement during annealing, with all that a move changes kept up to date: for each cut the ``_sums`` of the
    powers of its steps, their ``_means`` and the ``_slowest`` of them, the ``_pace`` of all periods together and the
    ``_largest_periods``, for each device the seconds that it spends on its group (``_loads``), for each stage the most
    of these (``_data``). Powers are taken of weights over the largest one, so that none overflows."""

    def __init__(self, stages: Stages, weights: Weights, near: Sequence[Sequence[int]], rng: random.Random) -> None:
        self._weights, self._near, self._rng = weights, near, rng
        self._stages = [list(group) for group in stages]
        self._top_step, self._top_period = _largest(weights.step), _largest(weights.period)
        self._home = [(0, 0)] * len(weights.exchange[0])  # stage and pipeline of each device
        self._loads = [0.0] * len(self._home)
        for stage, (group, exchange) in enumerate(zip(stages, weights.exchange, strict=True)):
            for pipeline, device in enumerate(group):
                self._home[device] = stage, pipeline
                self._loads[device] = sum(exchange[device][other] for other in group)
        self._data = [max(self._loads[device] for device in group) for group in stages]
        self._least_load = min(least_loads(weights, len(stages[0])))
        self._ends: dict[
            int, tuple[int, int]
        ] = {}  # of the slowest link over cut t, and at ~t the one of largest period
        self.best = [list(group) for group in stages]
        self.best_cost = evaluate(stages, weights).total

    def smooth(self, power: float) -> None:
        """Take power means of this power from now on."""
        self._inverse = 1.0 / power
        self._watch = power >= WATCHED
        width, cuts = len(self._stages[0]), len(self._stages) - 1
        self._steps = _powers(self._weights.step, self._top_step, power, width)
        self._periods = _powers(self._weights.period, self._top_period, power, width * cuts) if self._top_period else []

    def wander(self, temperature: float, moves: int) -> None:
        """Try ``moves`` moves."""
        self._recount()
        random, log, count = self._rng.random, math.log, len(self._home)
        cuts = len(self._stages) - 1
        for _ in range(moves):
            choice = random()
            tolerance = -temperature * log(1.0 - random())
            if choice < REVERSALS:
                if cuts and self._weights.even:
                    self._reverse(tolerance)
                continue
            other = -1
            if choice < REVERSALS + SLOWEST_MEMBERS:
                slowest = self._stages[self._data.index(max(self._data))]
                one = max(slowest, key=self._loads.__getitem__)
            elif cuts and choice < REVERSALS + SLOWEST_MEMBERS + SLOWEST_LINKS:
                one, partner = self._slowest_link()
                if random() < NEAR:
                    rank, near = random(), self._near[partner]
                    other = near[int(rank**3 * len(near))]
            else:
                one = int(random() * count)
            if other < 0:
                other = int(random() * count)
            if one != other:
                self._swap(one, other, tolerance)

    def _recount(self) -> None:
        """Compute the sums anew: small differences of large numbers accumulate errors in them."""
        self._sums, self._means, self._slowest, self._largest_periods, self._pace = [], [], [], [], 0.0
        for cut in range(len(self._stages) - 1):
            total = self._over(self._steps[cut], cut)
            self._sums.append(total)
            self._means.append(self._top_step * total**self._inverse)
            self._pace += self._over(self._periods[cut], cut) if self._periods else 0.0
            self._slowest.append(0.0)
            self._largest_periods.append(0.0)
        self._keep_slowest(range(len(self._sums)))

    def _over(self, matrix: Matrix, cut: int) -> float:
        return sum(matrix[a][b] for a, b in zip(self._stages[cut], self._stages[cut + 1], strict=True))

    def _keep_slowest(self, cuts: Iterable[int]) -> None:
        for cut in cuts:
            above, below, step = self._stages[cut], self._stages[cut + 1], self._weights.step[cut]
            self._slowest[cut] = max([step[a][b] for a, b in zip(above, below, strict=True)])
            if self._periods:
                period = self._weights.period[cut]
                self._largest_periods[cut] = max([period[a][b] for a, b in zip(above, below, strict=True)])

    def _slowest_link(self) -> tuple[int, int]:
        """Return the two ends of the slowest link of a random cut, in any order."""
        random = self._rng.random
        cut = int(random() * len(self._sums))
        matrix = self._weights.step[cut]
        if self._periods and random() < 0.5:
            cut, matrix = ~cut, self._weights.period[cut]
        ends = self._ends.get(cut)
        if ends is None:
            above, below = self._stages[max(cut, ~cut)], self._stages[max(cut, ~cut) + 1]
            _, ends = max((matrix[a][b], (a, b)) for a, b in zip(above, below, strict=True))
            self._ends[cut] = ends
        return ends if random() < 0.5 else ends[::-1]

    def _swap(self, one: int, other: int, tolerance: float) -> None:
        """Let two devices swap places, if the surrogate grows by less than ``tolerance``. Links are equal in both
        directions, so the link between the two does not change."""
        stages, steps, periods, last = self._stages, self._steps, self._periods, len(self._sums)
        (g, i), (h, k) = self._home[one], self._home[other]
        pace, sums = self._pace, dict[int, float]()
        for gone, come, stage, pipeline in ((one, other, g, i), (other, one, h, k)):
            for cut, neighbours in ((stage - 1, stage - 1), (stage, stage + 1)):
                if 0 <= cut < last:
                    neighbour = stages[neighbours][pipeline]
                    if neighbour != come:
                        row = steps[cut][neighbour]
                        sums[cut] = (sums[cut] if cut in sums else self._sums[cut]) + row[come] - row[gone]
                        if periods:
                            row = periods[cut][neighbour]
                            pace += row[come] - row[gone]
        growth = self._growth(sums, pace)
        if g == h:
            if growth >= tolerance:
                return
        else:
            data, worst = self._data, max(self._data)
            before = data[g], data[h]
            data[g] = data[h] = self._least_load
            if growth + max(data) - worst + SHARE * (2 * self._least_load - sum(before)) < tolerance:
                left, right = self._loads_after(g, one, other), self._loads_after(h, other, one)
                data[g], data[h] = max(left), max(right)
                growth += max(data) - worst + SHARE * (data[g] + data[h] - sum(before))
            else:
                growth = math.inf
            if growth >= tolerance:
                data[g], data[h] = before
                return
        stages[g][i], stages[h][k] = other, one
        self._home[one], self._home[other] = (h, k), (g, i)
        if g != h:
            for stage, loads in ((g, left), (h, right)):
                for device, load in zip(stages[stage], loads, strict=True):
                    self._loads[device] = load
        self._accept(sums, pace)

    def _loads_after(self, stage: int, leaving: int, coming: int) -> list[float]:
        """Return what the members of a stage spend on it when one device takes the place of another."""
        group, exchange, loads = self._stages[stage], self._weights.exchange[stage], self._loads
        gone, new = exchange[leaving], exchange[coming]
        after = [loads[device] - gone[device] + new[device] for device in group]
        after[group.index(leaving)] = sum([new[device] for device in group]) - new[leaving]
        return after

    def _growth(self, sums: dict[int, float], pace: float) -> float:
        """Return the growth of the pipeline's part of the surrogate."""
        growth, top, inverse, means = 0.0, self._top_step, self._inverse, self._means
        for cut, total in sums.items():
            growth += (top * total**inverse if total > 0.0 else 0.0) - means[cut]
        if self._periods:
            growth += self._top_period * (max(pace, 0.0) ** self._inverse - max(self._pace, 0.0) ** self._inverse)
        return growth

    def _reverse(self, tolerance: float) -> None:
        """Reverse consecutive stages, if the surrogate grows by less than ``tolerance``."""
        random, stages = self._rng.random, self._stages
        first, last = sorted((int(random() * len(stages)), int(random() * len(stages))))
        if first == last:
            return
        joints = [
            (cut, pair)
            for cut, pair in ((first - 1, (first - 1, last)), (last, (first, last + 1)))
            if 0 <= cut < len(self._sums)
        ]
        pace, sums = self._pace, {}
        for cut, (one, other) in joints:
            pairs = list(zip(stages[one], stages[other], strict=True))
            sums[cut] = sum(self._steps[cut][a][b] for a, b in pairs)
            if self._periods:
                pace += sum(self._periods[cut][a][b] for a, b in pairs) - self._over(self._periods[cut], cut)
        if self._growth(sums, pace) >= tolerance:
            return
        stages[first : last + 1] = stages[first : last + 1][::-1]
        self._data[first : last + 1] = self._data[first : last + 1][::-1]
        for per_cut in (self._sums, self._means, self._slowest, self._largest_periods):
            per_cut[first:last] = per_cut[first:last][::-1]
        self._ends.clear()
        for stage in range(first, last + 1):
            for pipeline, device in enumerate(stages[stage]):
                self._home[device] = stage, pipeline
        self._accept(sums, pace)

    def _accept(self, sums: dict[int, float], pace: float) -> None:
        for cut, total in sums.items():
            self._sums[cut] = total
            self._means[cut] = self._top_step * max(total, 0.0) ** self._inverse
            self._ends.pop(cut, None)
            self._ends.pop(~cut, None)
        self._pace = pace
        if not self._watch:
            return
        self._keep_slowest(sums)
        cost = max(self._data) + sum(self._slowest) + max(self._largest_periods, default=0.0)
        if cost < self.best_cost * (1 - 1e-12):
            self.best, self.best_cost = [list(group) for group in self._stages], cost


def _largest(matrices: Sequence[Matrix]) -> float:
    return max((value for matrix in matrices for row in matrix for value in row), default=0.0)


def _powers(matrices: Sequence[Matrix], top: float, power: float, count: int) -> list[Matrix]:
    """Return ``(weight / top)^power / count``: summed over ``count`` links, it is the power mean to that power.
    Matrices that are shared stay shared."""
    made = {
        id(matrix): [[(value / top) ** power / count if top else 0.0 for value in row] for row in matrix]
        for matrix in {id(matrix): matrix for matrix in matrices}.values()
    }
    return [made[id(matrix)] for matrix in matrices]


def neighbours(weights: Weights) -> list[list[int]]:
    """Return the other devices from near to far, for each device."""
    matrices = {id(matrix): matrix for matrix in (*weights.step, *weights.period)}.values()
    near = []
    for device in range(len(weights.exchange[0])):
        distance = [sum(matrix[device][other] for matrix in matrices) for other in range(len(weights.exchange[0]))]
        near.append(sorted((other for other in range(len(distance)) if other != device), key=distance.__getitem__))
    return near
