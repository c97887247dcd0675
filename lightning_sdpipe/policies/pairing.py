"""Choice of the pipelines or groups that average: pure functions that all workers compute alike, or that a policy draws
by. A tournament table divides many workers into groups.

Rings, shifted pairs and random pairs need no scheduler: they depend only on the number of the round and on *places*,
which number the participants.

PHD-PSGD's weighted probabilistic graph says which groups meet, and how fast that mixes (paper §3.3).

The paper draws groups of similar speed more often, without a formula. Here

    w_ij = (min(t_i, t_j) / max(t_i, t_j))^γ,    P_ij = w_ij / Σ_k w_ik,

with t_i the seconds of a step of group i. γ = 0 draws evenly; γ = 1 gives the paper's example (§5.2): times of 1, 1, 2
and 2 yield 0.5 within the two pairs and 0.25 across. As every ready group draws once, group i draws at the rate
r_i = 1/t_i, so that i and j meet in the share q_ij = (r_i P_ij + r_j P_ji) / Σ r of all meetings, each of which is a
mean of two. The expected mixing matrix is E[W] = I - ½ L, with L the Laplacian of q.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from itertools import pairwise


def ring(place: int, size: int) -> tuple[int, ...]:
    """Return the neighbours of ``place`` in a ring of ``size`` places: none, one or two."""
    return tuple(sorted({(place - 1) % size, (place + 1) % size} - {place}))


def shift_one(place: int, size: int, number: int) -> int | None:
    """Return the partner in round ``number`` if pairs shift by one: r < n/2 meets (number + r) mod (n/2) + n/2.

    So each place of the first half meets each of the second in n/2 rounds. With an odd number, the places of the first
    half take turns staying alone (None).
    """
    half = (size + 1) // 2
    partner = (number + place) % half + half if place < half else (place - half - number) % half
    return partner if partner < size else None


@functools.lru_cache(maxsize=256)
def matching(num_pipelines: int, seed: int, iteration: int) -> tuple[int, ...]:
    """Return the partner of every pipeline in ``iteration``; if their number is odd, one is its own partner."""
    order = sorted(range(num_pipelines), key=lambda pipeline: uniform(seed, iteration, pipeline))
    partners = list(range(num_pipelines))
    for a, b in zip(order[::2], order[1::2], strict=False):
        partners[a], partners[b] = b, a
    return tuple(partners)


def similarities(times: Sequence[float], group: int, gamma: float) -> list[float]:
    """Return w of ``group`` with each group; 0 with itself."""
    own = times[group]
    return [0.0 if j == group else (min(own, other) / max(own, other)) ** gamma for j, other in enumerate(times)]


def draw(weights: Sequence[tuple[int, float]], number: float) -> int:
    """Return the worker in ``weights`` (worker, weight) that ``number`` in [0, 1) falls on."""
    left = number * sum(weight for _, weight in weights)
    for worker, weight in weights:
        left -= weight
        if left < 0:
            return worker
    return weights[-1][0]


def by_turns(workers: Sequence[int], size: int, turn: int) -> list[list[int]]:
    """Cut ``workers`` into the fewest groups of at most ``size``, about equal, differently every ``turn``.

    For pairs this is the circle method of tournaments: one worker stays, the others move round a table, and those that
    sit opposite each other meet, so over the turns all pairs of the same workers meet.
    """
    table: list[int] = sorted(workers)
    if len(table) > 2:
        shift = turn % (len(table) - 1)
        table = [table[0], *table[1 + shift :], *table[1 : 1 + shift]]
    half = (len(table) + 1) // 2
    front, back = table[:half], table[half:][::-1]
    seated = [worker for pair in zip(front, back, strict=False) for worker in pair] + front[len(back) :]
    count = math.ceil(len(seated) / size)
    ends = [math.ceil(len(seated) * number / count) for number in range(count + 1)]
    return [seated[start:end] for start, end in pairwise(ends)]


def uniform(*key: int) -> float:
    """Return a number in [0, 1), evenly spread over the arguments. Thus a policy draws without a generator, a log of
    its events replays, and all stages draw alike where they should."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
