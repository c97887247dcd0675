"""Division of many workers into groups by a tournament table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise


def splits_of(
    workers: Sequence[int], size: int, turn: int, near: Sequence[Sequence[int]] | None
) -> Iterator[list[list[int]]]:
    """Yield ways to divide ``workers`` into groups of at most ``size`` at this turn, the preferred one first.

    Args:
        near: pipelines that are near each other and stay together at odd turns; None if all are equally near.
    """
    if near is None:
        yield by_turns(workers, size, turn)
        return
    if turn % 2:
        yield by_nearness(workers, size, turn // 2, near)
    yield by_turns(workers, size, turn // 2)


def on_one_host(workers: Iterable[int], hosts: Mapping[int, str]) -> list[list[int]]:
    """Return ``workers`` by their machines; those whose machine is not known are left out."""
    found: dict[str, list[int]] = {}
    for worker in sorted(workers):
        if host := hosts.get(worker, ""):
            found.setdefault(host, []).append(worker)
    return [*found.values()]


def by_turns(workers: Sequence[int], size: int, turn: int) -> list[list[int]]:
    """Cut ``workers`` into as few groups of at most ``size`` as possible, about equal, differently every ``turn``.

    For pairs this is the circle method of tournaments: one worker stays, the others move round a table, and
    those that sit opposite each other meet, so that in turns of the same workers all pairs meet.
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


def by_nearness(workers: Sequence[int], size: int, turn: int, near: Sequence[Sequence[int]]) -> list[list[int]]:
    """Cut ``workers`` into groups of at most ``size`` among pipelines that are ``near`` each other; workers that would
    be alone form groups together."""
    together = [[worker for worker in workers if worker in neighbours] for neighbours in near]
    parts = [part for here in together if len(here) > 1 for part in by_turns(here, size, turn)]
    seated = {worker for part in parts for worker in part}
    alone = [worker for worker in workers if worker not in seated]
    return parts + (by_turns(alone, size, turn) if alone else [])
