"""Exact split of devices into pipelines, by counts.

With n the counts of classes of devices that are alike, averaging in groups makes ``f(n) = max over c ≤ n of λ(c) + f(n
− c)``, with λ of :mod:`lightning_sdpipe.placement.fleet`. The rate of a split is known before λ of the whole, which is
not computed unless its bound is higher. With all-reduce, N pipelines make N times the rate of the slowest, so the
largest least λ is searched for, for each N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise

from lightning_sdpipe.placement.fleet import Counts, Fleet
from lightning_sdpipe.placement.throughput import GROUP, Spans

SHARED_CUTS = 300
"""Number of cuts that pipelines of one depth may have in common, up to which all are tried; beyond it, those that suit
some pipeline best are."""


def free(fleet: Fleet) -> Iterator[Sequence[Counts]]:
    """Yield splits into pipelines of any depth, one of which is the fastest."""
    alone: tuple[float, Counts] = (0.0, ())
    for bound, counts in sorted(((fleet.bound(counts), counts) for counts in fleet.states), reverse=True):
        if bound <= alone[0]:
            break
        alone = max(alone, (fleet.rate(counts, 1), counts))
    yield [alone[1]] if alone[0] else []
    for members in range(2, min(GROUP, sum(fleet.counts) // fleet.least_depth) + 1):
        yield most_of_all(fleet, members)[1]
    if fleet.sync == "all_reduce":
        yield from _equally_fast(fleet, alone[0])


def most_of_all(fleet: Fleet, members: int) -> tuple[float, Sequence[Counts]]:
    """Return f of all devices, and the split that attains it.

    Args:
        fleet: the devices.
        members: number of members (k) for λ.
    """
    nothing: Counts = tuple(0 for _ in fleet.counts)
    best: dict[Counts, tuple[float, Sequence[Counts]]] = {nothing: (0.0, ())}
    whole: list[tuple[Counts, float]] = []  # counts that make more than any split of them
    for counts in fleet.states:
        found: tuple[float, Sequence[Counts]] = (0.0, ())
        for number, count in enumerate(counts):
            if count:
                found = max(
                    found, best[(*counts[:number], count - 1, *counts[number + 1 :])], key=lambda entry: entry[0]
                )
        for part, rate in whole:
            rest = tuple(a - b for a, b in zip(counts, part, strict=True))
            if min(rest) >= 0 and rate + best[rest][0] > found[0]:
                found = rate + best[rest][0], (part, *best[rest][1])
        if fleet.bound(counts) > found[0] and (rate := fleet.rate(counts, members)) > found[0]:
            whole.append((counts, rate))
            found = rate, (counts,)
        best[counts] = found
    return best[fleet.counts]


def _equally_fast(fleet: Fleet, made: float) -> Iterator[Sequence[Counts]]:
    """Yield for each N the N pipelines whose slowest is fastest, if they make more than ``made`` together."""
    for number in range(2, sum(fleet.counts) + 1):
        able = {
            counts: rate
            for counts in fleet.states
            if number * fleet.bound(counts) > made
            and sum(counts) <= sum(fleet.counts) - number + 1
            and number * (rate := fleet.rate(counts, number)) > made
        }
        least, split = _layered(fleet.counts, [able] * number, min, math.inf)
        if split:
            made = number * least
            yield split


def of_depths(fleet: Fleet, depths: Sequence[int]) -> Sequence[Counts]:
    """Return the best split into pipelines of these depths; empty if there is none."""
    members = fleet.members(len(depths))
    of_depth = {
        depth: {c: rate for c in fleet.states if sum(c) == depth and (rate := fleet.rate(c, members))}
        for depth in set(depths)
    }
    layers = [of_depth[depth] for depth in depths]
    if fleet.sync == "all_reduce":
        return _layered(fleet.counts, layers, min, math.inf)[1]
    return _layered(fleet.counts, layers, lambda one, other: one + other, 0.0)[1]


def _layered(
    counts: Counts, layers: Sequence[Mapping[Counts, float]], combine: Callable[[float, float], float], start: float
) -> tuple[float, Sequence[Counts]]:
    """Return a choice from each layer that uses at most the available devices, with the largest combined rate."""
    best: dict[Counts, tuple[float, tuple[Counts, ...]]] = {tuple(0 for _ in counts): (start, ())}
    for able in layers:
        following: dict[Counts, tuple[float, tuple[Counts, ...]]] = {}
        for used, (value, parts) in best.items():
            for part, rate in able.items():
                to = tuple(a + b for a, b in zip(used, part, strict=True))
                if all(a <= b for a, b in zip(to, counts, strict=True)):
                    made = combine(value, rate)
                    if to not in following or made > following[to][0]:
                        following[to] = made, (*parts, part)
        best = following
    return max(best.values(), key=lambda entry: entry[0], default=(0.0, ()))


def shared_cuts(fleet: Fleet) -> Iterator[Spans]:
    """Yield cuts that pipelines of one depth may have in common."""
    blocks = len(fleet.chain)
    for depth in range(1, min(sum(fleet.counts), blocks) + 1):
        if math.comb(blocks - 1, depth - 1) <= SHARED_CUTS:
            for cuts in combinations(range(1, blocks), depth - 1):
                if all(fleet.chain[end - 1].activation_bytes is not None for end in cuts):
                    yield tuple(range(a, b) for a, b in pairwise((0, *cuts, blocks)))
            continue
        found = {
            row.spans
            for counts in fleet.states
            if sum(counts) == depth and fleet.could_hold(counts)
            for order in fleet.orders(counts)
            if (row := fleet.row(fleet.devices(order))) is not None
        }
        yield from sorted(found, key=lambda spans: [span.start for span in spans])
