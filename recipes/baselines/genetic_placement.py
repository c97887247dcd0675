"""DT-FM's own search, to compare with: a genetic algorithm with a local search (§3.4). It is seeded, unlike the
published code.

As the paper says, a new partition replaces the worst one if it is better than that; the published code compares with
``max(a, score > b)``, which accepts worse ones.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lightning_sdpipe.placement.arrange import Stages, arrange
from lightning_sdpipe.placement.network import Matrix
from recipes.baselines.dtfm_cost import Weights, evaluate

POPULATION = 100
TRIALS = 4900
CROSSOVER = 5
"""Number of devices whose groups a child takes from its first parent."""

Labels = list[int]
"""The group of each device."""


@dataclass
class Progress:
    """The best placement so far, and the seconds at which each better one was found."""

    cost: float = math.inf
    stages: Stages = field(default_factory=list)
    improvements: list[tuple[float, float]] = field(default_factory=list)

    def offer(self, stages: Stages, cost: float, seconds: float) -> None:
        if cost < self.cost:
            self.cost, self.stages = cost, stages
            self.improvements.append((seconds, cost))


def genetic(
    weights: Weights, num_devices: int, seed: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Progress:
    """Run the genetic search of §3.4 until :data:`TRIALS` children have been made or the time is up.

    Args:
        weights: costs of the links for M even stages; the local search looks at the links of a cut.
        num_devices: n, a multiple of M.
        seed: seed of all randomness.
        seconds: limit of time.
        clock: returns monotonic seconds.
    """
    rng = random.Random(seed)
    start = clock()
    progress = Progress()
    size = num_devices // weights.num_stages
    gains = _Gains(weights, size)
    population: list[tuple[float, Labels]] = []
    for candidate in _candidates(rng, num_devices, size, population, gains):
        stages, cost = _scored(candidate, weights)
        progress.offer(stages, cost, clock() - start)
        if len(population) < POPULATION:
            population.append((cost, candidate))
        else:
            worst = max(range(POPULATION), key=lambda number: population[number][0])
            if cost < population[worst][0]:
                population[worst] = (cost, candidate)
        if clock() - start >= seconds:
            break
    return progress


def _candidates(
    rng: random.Random, num_devices: int, size: int, population: Sequence[tuple[float, Labels]], gains: _Gains
) -> Iterator[Labels]:
    for _ in range(POPULATION):
        labels = [device // size for device in range(num_devices)]
        rng.shuffle(labels)
        yield labels
    for _ in range(TRIALS):
        one, other = rng.choice(population)[1], rng.choice(population)[1]
        yield move_in_circles(crossed(one, other, rng, size), gains)


def crossed(one: Labels, other: Labels, rng: random.Random, size: int) -> Labels:
    """Return the parent ``other`` with a few devices moved to their groups in ``one``. Surplus devices go to the first
    group that has room."""
    labels = list(other)
    for device in rng.sample(range(len(labels)), CROSSOVER):
        labels[device] = one[device]
    counts = [labels.count(group) for group in range(len(labels) // size)]
    for device, group in enumerate(labels):
        if counts[group] > size:
            room = next(number for number, count in enumerate(counts) if count < size)
            counts[group] -= 1
            counts[room] += 1
            labels[device] = room
    return labels


def _scored(labels: Labels, weights: Weights) -> tuple[Stages, float]:
    """Return the partition in its best arrangement, with its cost."""
    groups: Stages = [[] for _ in range(weights.num_stages)]
    for device, group in enumerate(labels):
        groups[group].append(device)
    found = arrange(groups, weights.step, weights.period, weights.even)
    return min(((stages, evaluate(stages, weights).total) for stages in found), key=lambda pair: pair[1])


@dataclass(frozen=True)
class _Move:
    gain: float
    device: int
    target: int


NO_MOVE = _Move(-math.inf, -1, -1)


class _Gains:
    """The gains promised by moving a device to another group."""

    def __init__(self, weights: Weights, size: int) -> None:
        self.num_groups, self._size, self._links = weights.num_stages, size, weights.step[0]

    def best(self, labels: Labels, locked: Sequence[bool]) -> tuple[list[_Move], Matrix]:
        """Return the most promising move out of each group, and the largest gain from each group to each other."""
        moves = [NO_MOVE] * self.num_groups
        between = [[-math.inf] * self.num_groups for _ in range(self.num_groups)]
        for device in self._movable(labels, locked):
            group, row = labels[device], self._links[device]
            sums = [0.0] * self.num_groups
            for other, theirs in enumerate(labels):
                sums[theirs] += row[other]
            here = min(row[other] for other, theirs in enumerate(labels) if theirs == group and other != device)
            for target, there in enumerate(sums):
                if target == group:
                    continue
                gain = there / self._size - here
                between[group][target] = max(between[group][target], gain)
                if gain > moves[group].gain:
                    moves[group] = _Move(gain, device, target)
        return moves, between

    def _movable(self, labels: Labels, locked: Sequence[bool]) -> Iterator[int]:
        """Yield, for each group, an end of its fastest link that may still move."""
        fastest: dict[int, tuple[float, int]] = {}
        for device, group in enumerate(labels):
            if not locked[device]:
                row = self._links[device]
                link = min(row[other] for other, theirs in enumerate(labels) if theirs == group and other != device)
                fastest[group] = min(fastest.get(group, (math.inf, -1)), (link, device))
        yield from (device for _, device in fastest.values())


def move_in_circles(labels: Labels, gains: _Gains) -> Labels:
    """Make circular moves (§3.4, after Kang and Moon, 2000).

    A cycle starts at the group whose best move gains most, and continues from that move's target until it returns.
    Moved devices do not move again. Of each cycle, the best beginning is kept, closed by sending its last device to the
    group where it started; of all cycles, of which there are at most as many as groups, the best number is kept.
    """
    locked = [False] * len(labels)
    reached = [False] * gains.num_groups
    states, sums = [labels], [0.0]
    for _ in range(gains.num_groups):
        current, gained = _cycle(states[-1], gains, locked, reached)
        states.append(current)
        sums.append(sums[-1] + gained)
        if all(reached):
            break
    return states[max(range(len(sums)), key=lambda number: (sums[number], -number))]


def _cycle(labels: Labels, gains: _Gains, locked: list[bool], reached: list[bool]) -> tuple[Labels, float]:
    current = list(labels)
    made: list[tuple[int, int, int]] = []  # device, from, to
    promised: list[float] = []
    closing: list[float] = []
    moves, between = gains.best(current, locked)
    start = at = max(range(gains.num_groups), key=lambda group: moves[group].gain)
    while (move := moves[at]).device >= 0:
        current[move.device] = move.target
        locked[move.device] = reached[move.target] = True
        made.append((move.device, at, move.target))
        promised.append(move.gain)
        closing.append(between[at][start] if at != start else -math.inf)
        at = move.target
        if at == start:
            break
        moves, between = gains.best(current, locked)
    totals = [sum(promised[:last]) + closing[last] for last in range(len(made))]
    if not made or max(totals) <= 0.0:
        return list(labels), 0.0
    last = max(range(len(made)), key=lambda number: (totals[number], -number))
    kept = list(labels)
    for device, _, target in made[:last]:
        kept[device] = target
    kept[made[last][0]] = start
    return kept, totals[last]
