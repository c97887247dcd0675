"""Schedule of the measurement of pairs, so that they do not disturb each other."""

from __future__ import annotations

from collections.abc import Sequence

MOST_DEVICES = 64
"""Largest number of devices with which all pairs of every two hosts are measured."""

SAMPLE = 4
"""Number of pairs of two hosts that are measured otherwise."""

Pair = tuple[int, int]


def circle(count: int) -> list[list[Pair]]:
    """Return rounds of disjoint pairs in which each participant meets each other once: one sits still, the others move
    round the table.

    Args:
        count: number of participants. If it is odd, one sits out in each round.
    """
    table: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(table) - 1):
        facing = zip(table[: len(table) // 2], reversed(table[len(table) // 2 :]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        table = [table[0], table[-1], *table[1:-1]]
    return rounds


def schedule(hosts: Sequence[str]) -> list[list[Pair]]:
    """Return rounds of pairs of ranks that are measured at the same time: no host takes part in two pairs of a round,
    since these would share its network card. First ranks of the same host meet, then hosts by the circle method, each
    pair of their ranks in a separate round.

    Args:
        hosts: the host of each rank.
    """
    members = by_host(hosts)
    inside = [[pair for meeting in circle(len(ranks)) for pair in meeting] for ranks in members]
    rounds = []
    for number in range(max(map(len, inside))):
        rounds.append(
            [
                (ranks[pairs[number][0]], ranks[pairs[number][1]])
                for ranks, pairs in zip(members, inside, strict=True)
                if number < len(pairs)
            ]
        )
    for meeting in circle(len(members)):
        crossing = [sampled(members[a], members[b], len(hosts)) for a, b in meeting]
        for number in range(max(map(len, crossing), default=0)):
            rounds.append([pairs[number] for pairs in crossing if number < len(pairs)])
    return rounds


def by_host(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, in the order in which hosts first appear."""
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return list(members.values())


def sampled(one: Sequence[int], other: Sequence[int], num_devices: int) -> list[Pair]:
    """Return the pairs of ranks of two hosts that are measured: all, or some that have as few ranks in common as
    possible."""
    pairs = [
        (min(a, b), max(a, b))
        for shift in range(len(other))
        for a, b in ((rank, other[(position + shift) % len(other)]) for position, rank in enumerate(one))
    ]
    return pairs if num_devices <= MOST_DEVICES else pairs[:SAMPLE]


def together(hosts: Sequence[str]) -> list[list[Pair]]:
    """Return rounds of the contended measurement: as many disjoint pairs of two hosts as possible, at the same
    time."""
    members = by_host(hosts)
    rounds = []
    for meeting in circle(len(members)):
        crossing = [list(zip(members[a], members[b], strict=False)) for a, b in meeting]
        rounds.append([pair for pairs in crossing if len(pairs) > 1 for pair in pairs])
    return [pairs for pairs in rounds if pairs]
