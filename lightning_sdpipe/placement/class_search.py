"""Classes of devices that are alike: a placement of classes is a far smaller problem than one of devices."""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lightning_sdpipe.placement.cost import Stages, Weights
from lightning_sdpipe.placement.matching import bottleneck
from lightning_sdpipe.placement.network import Matrix

TOLERANCE = 0.1
"""Largest difference of the link costs of devices of one class, as the root mean square over all other devices: a mean
evens out noise, and a square still sees the one link in fifty to a device of the same host."""

SAME = 1e-9
"""Largest difference that counts as rounding."""

Counts = tuple[int, ...]
"""Number of members of each class in a group."""
ALL_STRUCTURES = 8
"""Largest number of stages for which every structure is tried; for more stages, as many structures are drawn as exist
for that number."""
MOVES = 1500
"""Number of moves of one annealing."""
HOT, COLD = 0.06, 0.0006
"""First and last temperature, as a share of the start's cost."""
SHARE = 0.03
"""Share of every group's data cost that counts besides the largest, as in the annealing of devices."""
CHUNK = 16


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


@dataclass(frozen=True)
class Outline:
    """A placement of classes: the composition of each of the M groups, and the largest period of a link in use."""

    groups: Sequence[Counts]
    limit: float


class ClassCosts:
    """Costs of groups, and of cuts between groups, of given composition, each computed once."""

    def __init__(self, weights: Weights) -> None:
        self._exchange, self.has_cuts = weights.exchange[0], bool(weights.step)
        self._step = weights.step[0] if weights.step else []
        self._period = weights.period[0] if weights.period else []
        periods = sorted({value for row in self._period for value in row})
        self.limits = periods if periods and periods[-1] > 0 else [math.inf]
        """Periods from which a limit is chosen; infinite if the cost has none."""
        self._data: dict[Counts, float] = {}
        self._cuts: dict[tuple[Counts, Counts, float], float] = {}

    def data(self, counts: Counts) -> float:
        """Return what the slowest member of a group spends on it."""
        if counts not in self._data:
            self._data[counts] = max(
                sum(count * cost for count, cost in zip(counts, row, strict=True)) - row[number]
                for number, row in enumerate(self._exchange)
                if counts[number]
            )
        return self._data[counts]

    def cut(self, one: Counts, other: Counts, limit: float) -> float:
        """Return the slowest link of the best matching between two groups, among links of a period up to ``limit``."""
        key = (one, other, limit) if one <= other else (other, one, limit)
        if key not in self._cuts:
            above = [number for number, count in enumerate(one) for _ in range(count)]
            below = [number for number, count in enumerate(other) for _ in range(count)]
            costs = [[self._step[a][b] if self._period[a][b] <= limit else math.inf for b in below] for a in above]
            self._cuts[key], _ = bottleneck(costs)
        return self._cuts[key]

    def floor(self, one: Counts, other: Counts) -> float:
        """Return a lower bound of the slowest link of any matching between two groups."""
        above = [number for number, count in enumerate(one) if count]
        below = [number for number, count in enumerate(other) if count]
        links = [[self._step[a][b] for b in below] for a in above]
        slowest: float = max([*map(min, links), *map(min, zip(*links, strict=True))])
        return slowest

    def least_cut(self, limit: float) -> float:
        """Return a lower bound of the cost of a cut, among links of a period up to ``limit``."""
        links = [
            step
            for steps, periods in zip(self._step, self._period, strict=True)
            for step, period in zip(steps, periods, strict=True)
            if period <= limit
        ]
        return min(links, default=0.0)

    def total(self, lengths: Sequence[int], runs: Sequence[Counts], limit: float) -> float:
        """Return the cost of a placement; infinite if it needs links of a longer period."""
        cost = max(map(self.data, runs))
        for length, counts in zip(lengths, runs, strict=True):
            if length > 1:
                cost += (length - 1) * self.cut(counts, counts, limit)
        for one, other in pairwise(runs):
            cost += self.cut(one, other, limit)
        return cost if limit == math.inf else cost + limit


def structures(num_stages: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Return compositions of M up to reversal, those with few runs first; a sample if there are many stages."""
    if num_stages <= ALL_STRUCTURES:
        found = {min(parts, parts[::-1]) for parts in _compositions(num_stages)}
    else:
        found = {(num_stages,)}
        halves = [(one, num_stages - one) for one in range(1, num_stages // 2 + 1)]
        found.update(halves)
        while len(found) < len(halves) + 2 ** (ALL_STRUCTURES - 2):
            cuts = [at for at in range(1, num_stages) if rng.random() < rng.choice((0.1, 0.3, 0.6, 1.0))]
            parts = tuple(end - start for start, end in pairwise((0, *cuts, num_stages)))
            found.add(min(parts, parts[::-1]))
    return sorted(found, key=lambda parts: (len(parts), parts))


def _compositions(total: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in _compositions(total - first):
            yield (first, *rest)


def anneal_runs(
    lengths: Sequence[int], classes: Classes, costs: ClassCosts, num_pipelines: int, rng: random.Random
) -> Iterator[Outline | None]:
    """Anneal the placements of one structure.

    Args:
        lengths: lengths of the runs, which add up to M.
        classes: classes of all devices, M × N in all.
        costs: costs of the classes.
        num_pipelines: N.
        rng: source of all randomness.

    Yields:
        better and better placements of the structure, and None in between, so that a caller that is short of time can
        stop. It yields nothing if the structure fits no placement.
    """
    runs = _filled(lengths, classes.sizes, num_pipelines, rng)
    if runs is None:
        return
    limit = len(costs.limits) - 1
    cost = best = costs.total(lengths, runs, costs.limits[limit])
    yield Outline(_spread(lengths, runs), costs.limits[limit])
    if len(runs) == 1 and len(costs.limits) == 1:
        return
    surrogate = cost + SHARE * _all_data(lengths, runs, costs)
    unit = cost
    for move in range(MOVES):
        if move % CHUNK == 0:
            yield None
        temperature = unit * HOT * (COLD / HOT) ** (move / MOVES)
        changed, new_limit = runs, limit
        if len(costs.limits) > 1 and (len(runs) == 1 or rng.random() < 0.1):
            new_limit = min(max(limit + rng.choice((-1, 1)), 0), len(costs.limits) - 1)
        else:
            changed = _moved(lengths, runs, rng) or runs
            if changed is runs:
                continue
        new_cost = costs.total(lengths, changed, costs.limits[new_limit])
        if new_cost == math.inf:
            continue
        new_surrogate = new_cost + SHARE * _all_data(lengths, changed, costs)
        if new_surrogate <= surrogate or rng.random() < math.exp((surrogate - new_surrogate) / temperature):
            runs, limit, cost, surrogate = changed, new_limit, new_cost, new_surrogate
            if cost < best * (1 - 1e-12):
                best = cost
                yield Outline(_spread(lengths, runs), costs.limits[limit])


def _spread(lengths: Sequence[int], runs: Sequence[Counts]) -> list[Counts]:
    return [counts for length, counts in zip(lengths, runs, strict=True) for _ in range(length)]


def _all_data(lengths: Sequence[int], runs: Sequence[Counts], costs: ClassCosts) -> float:
    return sum(length * costs.data(counts) for length, counts in zip(lengths, runs, strict=True)) / sum(lengths)


def _filled(
    lengths: Sequence[int], sizes: Sequence[int], num_pipelines: int, rng: random.Random
) -> list[Counts] | None:
    """Return groups for every run that together use up every class; None if none were found.

    Long runs come first: they take a multiple of their length of each class, and the last runs get the remaining
    devices.
    """
    order = sorted(range(len(lengths)), key=lambda run: -lengths[run])
    for _ in range(20):
        left = list(sizes)
        runs: list[Counts] = [()] * len(lengths)
        for run in order:
            counts = _draw(lengths[run], left, num_pipelines, rng)
            if counts is None:
                break
            runs[run] = counts
            left = [have - lengths[run] * count for have, count in zip(left, counts, strict=True)]
        else:
            return runs
    return None


def _draw(length: int, left: Sequence[int], num_pipelines: int, rng: random.Random) -> Counts | None:
    """Return the composition of the groups of a run of this length, from the remaining devices: some classes whole,
    others in part."""
    counts = [0] * len(left)
    order = list(range(len(left)))
    rng.shuffle(order)
    if rng.random() < 0.5:
        order.sort(key=lambda number: -left[number])
    for whole in (False, True):
        for number in order:
            most = min(num_pipelines - sum(counts), left[number] // length - counts[number])
            if most > 0 and not whole and rng.random() < 0.5:
                most = rng.randint(1, most)
            counts[number] += max(most, 0)
    return tuple(counts) if sum(counts) == num_pipelines else None


def _moved(lengths: Sequence[int], runs: Sequence[Counts], rng: random.Random) -> list[Counts] | None:
    """Exchange members of two runs; return None if the drawn runs have none to exchange."""
    one = rng.randrange(len(runs))
    other = rng.randrange(len(runs) - 1)
    other += other >= one
    changed = list(runs)
    if lengths[one] == lengths[other] and rng.random() < 0.1:
        changed[one], changed[other] = changed[other], changed[one]
        return changed
    common = math.gcd(lengths[one], lengths[other])
    gives, takes = lengths[other] // common, lengths[one] // common
    able = [number for number, count in enumerate(runs[one]) if count >= gives]
    willing = [number for number, count in enumerate(runs[other]) if count >= takes]
    if not able or not willing:
        return None
    given, taken = rng.choice(able), rng.choice(willing)
    if given == taken:
        return None
    first, second = list(runs[one]), list(runs[other])
    first[given] -= gives
    first[taken] += gives
    second[taken] -= takes
    second[given] += takes
    changed[one], changed[other] = tuple(first), tuple(second)
    return changed
