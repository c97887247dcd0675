"""Division of equal pieces of work among workers of different speeds, in whole pieces."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key", int, tuple[bool, int])


def proportional_shares(pieces: int, workers: Mapping[Key, tuple[float, float]]) -> dict[Key, int]:
    """Give each of ``pieces`` to the worker that finishes it first, which makes the last of them end soonest.

    Args:
        pieces: number of pieces.
        workers: for each, when it is free and the seconds that it takes for a piece, above 0.

    Returns:
        Pieces of each worker; of two that would finish one at the same time, the lower gets it.
    """
    given = dict.fromkeys(workers, 0)
    # Most of them at once: all work until `end`, the time at which all is done if pieces could be cut.
    busy = sorted(workers, key=lambda i: workers[i][0])
    rate = owed = 0.0
    for count, i in enumerate(busy):
        free, seconds = workers[i]
        rate, owed = rate + 1 / seconds, owed + free / seconds
        end = (pieces + owed) / rate
        if count + 1 == len(busy) or end <= workers[busy[count + 1]][0]:
            for j in busy[: count + 1]:
                # One less than fits, lest rounding gives a worker more than it would finish first.
                given[j] = max(0, math.floor((end - workers[j][0]) / workers[j][1]) - 1)
            break
    queue = [(free + seconds * (given[i] + 1), i) for i, (free, seconds) in workers.items()]
    heapq.heapify(queue)
    for _ in range(pieces - sum(given.values()) if queue else 0):
        at, i = queue[0]
        given[i] += 1
        heapq.heapreplace(queue, (at + workers[i][1], i))
    return given


def shares_by_speed(pieces: int, workers: Mapping[int, tuple[float, float]]) -> dict[int, int]:
    """Divide ``pieces`` so that the last worker is done as soon as possible. If there are enough, each gets at least
    one: without any, a slow worker would count as slow for ever.

    Args:
        pieces: number of pieces.
        workers: for each, the seconds for which it is idle, and those that it takes for a piece, above 0.
    """
    least = int(pieces >= len(workers))
    begun = {worker: (idle + least * seconds, seconds) for worker, (idle, seconds) in workers.items()}
    more = proportional_shares(pieces - least * len(workers), begun)
    return {worker: least + more[worker] for worker in workers}


def divide(pieces: Sequence[int], seconds: Mapping[int, float]) -> dict[int, list[int]]:
    """Give each of ``pieces``, in their order, to the worker that finishes it first. So long pieces, where they lie
    together, are spread over all. If there are enough pieces, each worker gets at least one.

    Args:
        pieces: numbers of the pieces.
        seconds: for each worker, the seconds that it takes for a piece, above 0.

    Returns:
        Pieces of each worker, in their order; of two workers that would finish one at the same time, the lower gets it.
    """
    given: dict[int, list[int]] = {worker: [] for worker in seconds}
    slowest_last = sorted(seconds, key=lambda worker: (seconds[worker], worker))
    first = slowest_last if len(pieces) >= len(slowest_last) else []
    for worker, piece in zip(first, pieces, strict=False):
        given[worker].append(piece)
    queue = [(seconds[worker] * (len(given[worker]) + 1), worker) for worker in slowest_last]
    heapq.heapify(queue)
    for piece in pieces[len(first) :]:
        at, worker = queue[0]
        given[worker].append(piece)
        heapq.heapreplace(queue, (at + seconds[worker], worker))
    return given


def divide_again(
    number: int, held: Mapping[int, Collection[int]], seconds: Mapping[int, float]
) -> dict[int, list[int]]:
    """Divide what is missing of the pieces 0 to ``number`` − 1 among the workers that are left.

    Args:
        number: number of all pieces.
        held: pieces that each worker has finished; those of workers that are gone do not count.
        seconds: for each worker that is left, the seconds that it takes for a piece.

    Returns:
        Further pieces of each worker that is left: none, if they have all.
    """
    done = {piece for worker in seconds for piece in held.get(worker, ())}
    return divide([piece for piece in range(number) if piece not in done], seconds)
