"""Measured links, combined as a network and as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from lightning_sdpipe.partition.memory import shown
from lightning_sdpipe.placement.measurement_schedule import Pair, by_host
from lightning_sdpipe.placement.model import Model
from lightning_sdpipe.placement.network import Device, Network, Shared
from lightning_sdpipe.placement.report import shown_seconds

SHARING = 0.8
"""Share of their bandwidth above which links that are all busy do not share a network card."""


class Link(msgspec.Struct, frozen=True):
    """Result of the first of two ranks: bytes per second to the other, and from it; or why they could not connect."""

    ranks: Pair
    latency: float = 0.0
    outward: float = 0.0
    inward: float = 0.0
    error: str = ""


def combine(devices: Sequence[Device], links: Sequence[Link], busy: Sequence[Link], model: Model | None) -> Network:
    """Return the network of these links.

    Args:
        devices: by rank.
        links: links of every pair, or of some pairs of any two hosts: then the others equal the median of these.
        busy: links of pairs that were measured at the same time, with ``outward`` only.
        model: the model with which the devices were measured.
    """
    count = len(devices)
    latency: list[list[float | None]] = [[0.0 if a == b else None for b in range(count)] for a in range(count)]
    bandwidth: list[list[float | None]] = [[None] * count for _ in range(count)]
    failed = {link.ranks for link in links if link.error}
    between: dict[tuple[str, str], list[Link]] = {}
    for link in links:
        if link.ranks not in failed:
            a, b = link.ranks
            latency[a][b] = latency[b][a] = link.latency
            bandwidth[a][b], bandwidth[b][a] = link.outward, link.inward
            between.setdefault(_hosts(devices, a, b), []).append(link)
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
    kept: dict[tuple[str, str], list[float]] = {}
    for link in busy:
        if link.ranks in alone and not link.error:
            kept.setdefault(_hosts(devices, *link.ranks), []).append(link.outward / alone[link.ranks])
    shares = {hosts: median(parts) for hosts, parts in kept.items()}
    return tuple(Shared(hosts, share) for hosts, share in sorted(shares.items()) if share < SHARING)


def _hosts(devices: Sequence[Device], a: int, b: int) -> tuple[str, str]:
    one, other = sorted((devices[a].host, devices[b].host))
    return one, other


def summary(network: Network, links: Sequence[Link], file: Path) -> str:
    """Return a row for every two hosts, one for each host, and the hosts that could not connect."""
    devices = network.devices
    lines = [f"{file}: {len(devices)} devices on {len({device.host for device in devices})} hosts"]
    between: dict[tuple[str, str], list[Link]] = {}
    for link in links:
        if not link.error:
            between.setdefault(_hosts(devices, *link.ranks), []).append(link)
    for (one, other), found in sorted(between.items()):
        slowest = min(rate for link in found for rate in (link.outward, link.inward))
        fastest = max(rate for link in found for rate in (link.outward, link.inward))
        where = f"within {one}" if one == other else f"{one} – {other}"
        delay = shown_seconds(median(link.latency for link in found))
        lines.append(f"  {where}: {delay}, {shown(slowest)}/s to {shown(fastest)}/s")
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
