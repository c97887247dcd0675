"""The cheapest placement of a few classes of identical devices, with a proof.

For every limit of the periods and every limit of the groups' data cost, from low to high, dynamic programming finds the
path of M groups within both limits that uses up all devices at the least sum of cuts: layer by layer over the used
devices and the last group, M/2 groups from either end, meeting in the middle. Paths and limits that cannot become
cheaper than the best known placement are left out.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from lightning_sdpipe.placement.class_search import ClassCosts, Counts, Outline

MOST_GROUPS = 2000
"""Largest number of compositions of a group with which the proof is tried: 8 devices of four classes have 165."""

MOST_STATES = 200_000
"""Largest number of states of a layer before the proof gives up: they take about 100 MB."""

CHUNK = 100
"""Expanded states between two yields."""


class _TooManyStates(Exception):
    """A layer has more than :data:`MOST_STATES`."""


def prove(
    costs: ClassCosts, sizes: Sequence[int], num_stages: int, num_pipelines: int, best: float
) -> Generator[Outline | None, None, bool]:
    """Look for placements that cost less than ``best``.

    Args:
        costs: costs of the classes.
        sizes: sizes of the classes; M × N together.
        num_stages: M.
        num_pipelines: N.
        best: the cost of a known placement.

    Yields:
        cheaper and cheaper placements, and None in between, so that a caller that is short of time can stop.

    Returns:
        Whether the search was complete: then the last placement that it yielded is optimal, or, if it yielded none, the
            known one.
    """
    groups = _compositions(sizes, num_pipelines)
    if len(groups) > MOST_GROUPS:
        return False
    groups.sort(key=lambda counts: (costs.data(counts), counts))
    for limit in costs.limits:
        least = costs.least_cut(limit)
        pace = 0.0 if limit == math.inf else limit
        for level in sorted({costs.data(counts) for counts in groups}):
            budget = (best - level - pace) * (1 - 1e-12)
            if (num_stages - 1) * least >= budget:
                break
            within = [counts for counts in groups if costs.data(counts) <= level]
            layers = _Layers(costs, within, tuple(sizes), num_stages, limit, least, budget)
            try:
                path = yield from layers.shortest_path()
            except _TooManyStates:
                return False
            if path is not None:
                best = level + pace + layers.budget
                yield Outline(path, limit)
    return True


def _compositions(sizes: Sequence[int], total: int) -> list[Counts]:
    """Return the ways to choose ``total`` members from classes of these sizes, cut off one above the limit."""
    found: list[tuple[int, ...]] = [()]
    for number, size in enumerate(sizes):
        rest = sum(sizes[number + 1 :])
        found = [
            (*counts, count)
            for counts in found
            for count in range(max(0, total - sum(counts) - rest), min(size, total - sum(counts)) + 1)
        ][: MOST_GROUPS + 1]
    return found


State = tuple[Counts, Counts]
"""The used number of each class, and the last group."""


@dataclass
class _Layers:
    """Paths of 1, 2, … groups that may become part of a path of M that costs less than ``budget``."""

    costs: ClassCosts
    groups: Sequence[Counts]
    sizes: Counts
    num_stages: int
    limit: float
    least: float  # lower bound of the cost of a cut
    budget: float

    def shortest_path(self) -> Generator[None, None, list[Counts] | None]:
        """Return the cheapest path, if it costs less than the budget, which is then lowered to that cost."""
        layers: list[dict[State, tuple[float, State | None]]] = [
            {(counts, counts): (0.0, None) for counts in self.groups}
        ]
        neighbours: dict[Counts, list[tuple[float, Counts]]] = {}
        half = self.num_stages // 2
        while len(layers) < self.num_stages - half:
            following: dict[State, tuple[float, State | None]] = {}
            left = self.num_stages - 1 - len(layers)  # cuts after the next one
            for number, (state, (length, _)) in enumerate(layers[-1].items()):
                if number % CHUNK == 0:
                    yield None
                used, last = state
                if last not in neighbours:
                    neighbours[last] = self._neighbours(last)
                    yield None
                for cut, counts in neighbours[last]:
                    if length + cut + left * self.least >= self.budget:
                        break
                    now = tuple(map(sum, zip(used, counts, strict=True)))
                    if any(a > b for a, b in zip(now, self.sizes, strict=True)):
                        continue
                    known = following.get((now, counts))
                    if known is None or length + cut < known[0]:
                        following[now, counts] = length + cut, state
            if len(following) > MOST_STATES:
                raise _TooManyStates
            layers.append(following)
        return (yield from self._meet(layers, half))

    def _meet(
        self, layers: list[dict[State, tuple[float, State | None]]], half: int
    ) -> Generator[None, None, list[Counts] | None]:
        if half == 0:  # one stage
            whole = (self.sizes, self.sizes)
            return [self.sizes] if whole in layers[0] and self._lower(0.0) else None
        ends: dict[Counts, list[tuple[float, Counts]]] = {}
        for (used, last), (length, _) in layers[half - 1].items():
            ends.setdefault(used, []).append((length, last))
        found: tuple[State, State] | None = None
        for number, ((used, last), (length, _)) in enumerate(layers[-1].items()):
            if number % CHUNK == 0:
                yield None
            rest = tuple(a - b for a, b in zip(self.sizes, used, strict=True))
            for other_length, other in ends.get(rest, ()):
                if length + other_length + self.least < self.budget:
                    total = length + other_length + self.costs.cut(last, other, self.limit)
                    if self._lower(total):
                        found = (used, last), (rest, other)
        if found is None:
            return None
        return self._back(found[0], layers)[::-1] + self._back(found[1], layers[:half])

    def _lower(self, length: float) -> bool:
        if length >= self.budget:
            return False
        self.budget = length
        return True

    def _back(self, state: State | None, layers: list[dict[State, tuple[float, State | None]]]) -> list[Counts]:
        """Return the groups of a path, the last one first."""
        groups = []
        for layer in reversed(layers):
            assert state is not None, "there are as many steps as layers"
            groups.append(state[1])
            _, state = layer[state]
        return groups

    def _neighbours(self, counts: Counts) -> list[tuple[float, Counts]]:
        """Return groups that may follow, the cheapest cut first."""
        most = self.budget - (self.num_stages - 2) * self.least
        near = [
            (self.costs.cut(counts, other, self.limit), other)
            for other in self.groups
            if self.costs.floor(counts, other) < most
        ]
        return sorted(pair for pair in near if pair[0] < most)
