"""Measures the links between all workers of a job: when and how each pair is measured, and the network they form."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_sdpipe.errors import counted
from lightning_sdpipe.partition.balance import shown
from lightning_sdpipe.placement.model import Model
from lightning_sdpipe.placement.network import Device, Network, Shared
from lightning_sdpipe.placement.report import shown_seconds

Pair = tuple[int, int]

SHARING = 0.8
"""Two hosts' links share a network card if, with all links busy, their share of their own bandwidth is below this."""

MOST_DEVICES = 64
"""Largest number of devices for which all pairs between two hosts are measured."""

SAMPLE = 4
"""Number of pairs between two hosts that are measured if there are more devices."""

PINGS, WARM_UP = 32, 4
SMALLEST, LARGEST = 2**16, 2**27
"""Least and largest bytes of the smaller of the two messages that give the slope."""

LEAST_SECONDS = 0.05
"""From this time on, a message's bytes determine its time."""

REPEATS = 4
"""Number of repeats; the quickest counts, since other load can only slow a message down."""


def circle(count: int) -> list[list[Pair]]:
    """Return rounds of disjoint pairs in which each participant meets every other once (the circle method: one stays,
    the others rotate).

    Args:
        count: number of participants. If it is odd, one pauses in each round.
    """
    table: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(table) - 1):
        facing = zip(table[: len(table) // 2], reversed(table[len(table) // 2 :]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        table = [table[0], table[-1], *table[1:-1]]
    return rounds


def schedule(hosts: Sequence[str]) -> list[list[Pair]]:
    """Return rounds of pairs of ranks that are measured at the same time. No host takes part in two pairs of a round,
    since they would share its network card. First the ranks of each host meet, then hosts by the circle method, with
    each pair of their ranks in a separate round.

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
    """Return the pairs of ranks of two hosts that are measured: all, or a few that share as few ranks as possible."""
    pairs = [
        (min(a, b), max(a, b))
        for shift in range(len(other))
        for a, b in ((rank, other[(position + shift) % len(other)]) for position, rank in enumerate(one))
    ]
    return pairs if num_devices <= MOST_DEVICES else pairs[:SAMPLE]


def together(hosts: Sequence[str], failed: Collection[Pair] = ()) -> list[list[Pair]]:
    """Return the rounds of the contended measurement: at the same time, as many disjoint pairs of two hosts as
    possible, except those that ``failed`` to connect."""
    members = by_host(hosts)
    rounds = []
    for meeting in circle(len(members)):
        crossing = [list(zip(members[a], members[b], strict=False)) for a, b in meeting]
        rounds.append([pair for pairs in crossing if len(pairs) > 1 for pair in pairs if pair not in failed])
    return [pairs for pairs in rounds if pairs]


class Wire:
    """A gloo connection between this process and another.

    Args:
        store: a store that both processes reach.
        name: name of the pair, known to both.
        leads: True in one of the two processes.
        timeout: limit for making the connection, and for every transfer.

    Raises:
        RuntimeError: the connection cannot be made.
    """

    def __init__(self, store: Store, name: str, leads: bool, timeout: timedelta) -> None:
        self._other = 1 if leads else 0
        self._group: Any = ProcessGroupGloo(PrefixStore(name, store), 1 - self._other, 2, timeout)

    def send(self, tensor: Tensor) -> None:
        self._group.send([tensor], self._other, 0).wait()

    def receive(self, tensor: Tensor) -> None:
        self._group.recv([tensor], self._other, 0).wait()


def latency(wire: Wire, leads: bool, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds for 8 bytes in one direction, half the median round trip, on the leading side; 0 on the
    other."""
    token = torch.zeros(1, dtype=torch.int64)
    trips = []
    for _ in range(WARM_UP + PINGS):
        if leads:
            start = clock()
            wire.send(token)
            wire.receive(token)
            trips.append(clock() - start)
        else:
            wire.receive(token)
            wire.send(token)
    return median(trips[WARM_UP:]) / 2 if leads else 0.0


def bandwidth(wire: Wire, leads: bool, outward: bool, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return, on the leading side, the bytes per second from it if ``outward``, else to it; 0 on the other side.

    The size is doubled until a message takes :data:`LEAST_SECONDS`. The result is the slope between that size and twice
    that size, which neither latency nor the capacity of a buffer distorts.
    """
    if not leads:
        _follow(wire, outward)
        return 0.0
    size = SMALLEST
    while _timed(wire, size, outward, clock) < LEAST_SECONDS and size < LARGEST:
        size *= 2
    short, long = (min(_timed(wire, amount, outward, clock) for _ in range(REPEATS)) for amount in (size, 2 * size))
    wire.send(torch.zeros(1, dtype=torch.int64))
    mean = 2 * size / long
    return min(size / (long - short), 2 * mean) if long > short else mean  # a slope far above the mean is noise


def _timed(wire: Wire, size: int, outward: bool, clock: Callable[[], float]) -> float:
    token, payload = torch.tensor([size]), _payload(size)
    start = clock()
    wire.send(token)
    if outward:
        wire.send(payload)
        wire.receive(token)
    else:
        wire.receive(payload)
    return clock() - start


def _follow(wire: Wire, outward: bool) -> None:
    token = torch.zeros(1, dtype=torch.int64)
    while True:
        wire.receive(token)
        if not token:
            return
        payload = _payload(int(token))
        if outward:
            wire.receive(payload)
            wire.send(token)
        else:
            wire.send(payload)


@lru_cache(maxsize=2)
def _payload(size: int) -> Tensor:
    """Return a tensor of ``size`` bytes, the same one each time, since fresh memory would first have to be mapped."""
    return torch.zeros(size, dtype=torch.uint8)


class Link(msgspec.Struct, frozen=True):
    """A link as the first of its two ranks found it: latency in seconds and bytes per second to the other rank and from
    it; or why they could not connect."""

    ranks: Pair
    latency: float = 0.0
    outward: float = 0.0
    inward: float = 0.0
    error: str = ""


def combine(devices: Sequence[Device], links: Sequence[Link], busy: Sequence[Link], model: Model | None) -> Network:
    """Return the network of these links.

    Args:
        devices: by rank.
        links: links of every pair, or of some pairs of any two hosts, whose median the others get.
        busy: links of pairs that were measured at the same time, in the ``outward`` direction only.
        model: the model with which the devices were measured.
    """
    count = len(devices)
    latency: list[list[float | None]] = [[0.0 if a == b else None for b in range(count)] for a in range(count)]
    bandwidth: list[list[float | None]] = [[None] * count for _ in range(count)]
    failed = {link.ranks for link in links if link.error}
    between = _by_hosts(devices, [link for link in links if link.ranks not in failed])
    for link in itertools.chain(*between.values()):
        a, b = link.ranks
        latency[a][b] = latency[b][a] = link.latency
        bandwidth[a][b], bandwidth[b][a] = link.outward, link.inward
    for a in range(count):
        for b in range(a + 1, count):
            known = between.get(_hosts(devices, a, b))
            if latency[a][b] is None and known and (a, b) not in failed:
                latency[a][b] = latency[b][a] = median(link.latency for link in known)
                rate = median(rate for link in known for rate in (link.outward, link.inward))
                bandwidth[a][b] = bandwidth[b][a] = rate
    kinds = sorted({device.host for device in devices})
    source = f"measured over gloo between {count} workers on {', '.join(kinds)}"
    return Network(tuple(devices), latency, bandwidth, source, model, _shared(devices, links, busy))


def _shared(devices: Sequence[Device], links: Sequence[Link], busy: Sequence[Link]) -> tuple[Shared, ...]:
    alone = {link.ranks: link.outward for link in links if not link.error}
    kept = _by_hosts(devices, [link for link in busy if link.ranks in alone and not link.error])
    shares = {hosts: median(link.outward / alone[link.ranks] for link in found) for hosts, found in kept.items()}
    return tuple(Shared(hosts, share) for hosts, share in sorted(shares.items()) if share < SHARING)


def _hosts(devices: Sequence[Device], a: int, b: int) -> tuple[str, str]:
    one, other = sorted((devices[a].host, devices[b].host))
    return one, other


def _by_hosts(devices: Sequence[Device], links: Sequence[Link]) -> dict[tuple[str, str], list[Link]]:
    between: dict[tuple[str, str], list[Link]] = {}
    for link in links:
        between.setdefault(_hosts(devices, *link.ranks), []).append(link)
    return between


def summary(network: Network, links: Sequence[Link], file: Path) -> str:
    """Return a summary for the terminal: a row for every two hosts, one for each host, and the pairs that could not
    connect."""
    devices = network.devices
    hosts = counted(len({device.host for device in devices}), "host")
    lines = [f"{file}: {counted(len(devices), 'device')} on {hosts}"]
    for (one, other), found in sorted(_by_hosts(devices, [link for link in links if not link.error]).items()):
        rates = [rate for link in found for rate in (link.outward, link.inward)]
        where = f"within {one}" if one == other else f"{one} – {other}"
        delay = shown_seconds(median(link.latency for link in found))
        lines.append(f"  {where}: {delay}, {shown(min(rates))}/s to {shown(max(rates))}/s")
    for shared in network.shared:
        lines.append(
            f"  {shared.hosts[0]} – {shared.hosts[1]} share a network card: with all links busy, each has "
            f"{shared.share:.2f} of its bandwidth, which is what counts"
        )
    for ranks in by_host([device.host for device in devices]):
        speeds = [devices[rank].speed for rank in ranks]
        memory = devices[ranks[0]].memory_bytes
        lines.append(
            f"  {devices[ranks[0]].host}: {len(ranks)} devices of speed {min(speeds):.2f} to {max(speeds):.2f}"
            + ("" if memory is None else f", {shown(memory)} each")
        )
    for (a, b), error in {link.ranks: link.error for link in links if link.error}.items():
        lines.append(f"NO CONNECTION between {devices[a]} (rank {a}) and {devices[b]} (rank {b}): {error}")
    if any(link.error for link in links):
        lines.append(
            "Training needs every pair to connect. Is there a firewall between them, or does gloo listen on the wrong "
            "network interface? GLOO_SOCKET_IFNAME names the right one."
        )
    return "\n".join(lines)
