"""A network of devices and links, measured or written by hand, from which every cost is computed.

There are two JSON formats. ``sdpipe-network/1``, which ``sdpipe measure`` writes, has a row for each device.
``sdpipe-sites/1``, for writing by hand, has a row for each site of identical devices. ``docs/placement.md`` shows both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from lightning_sdpipe.errors import ConfigurationError, os_errors_as
from lightning_sdpipe.placement.model import Model
from lightning_sdpipe.topology.placement_file import one_row_per_line

FORMAT = "sdpipe-network/1"
SITES = "sdpipe-sites/1"

Matrix: TypeAlias = list[list[float]]
Links: TypeAlias = Sequence[Sequence[float | None]]
Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]


class Device(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """One worker's device.

    ``speed`` is relative to the others; ``memory_bytes`` is the part of its memory that training may use, None if
    unknown.
    """

    host: str
    index: int  # among the devices of its host
    speed: Positive
    memory_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.index}"


class Shared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two hosts whose links share network cards. ``share`` is the ratio of a link's bandwidth when all are busy to its
    bandwidth alone."""

    hosts: tuple[str, str]
    share: Annotated[float, msgspec.Meta(gt=0, le=1)]


class Network(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """Devices, and the links between them.

    Args:
        devices: device i is rank i of the measuring run.
        latency_seconds: n × n, from row to column; None where no connection can be made. The diagonal is ignored.
        bandwidth_bytes_per_second: n × n, in the same form.
        source: the origin of the figures, in words.
        model: the model with which the devices were measured; None if only the links were measured.
        shared: pairs of hosts that share network cards.

    Raises:
        ConfigurationError: a matrix is not n × n, an entry is impossible, or devices cannot be distinguished.
    """

    devices: Annotated[tuple[Device, ...], msgspec.Meta(min_length=1)]
    latency_seconds: Links
    bandwidth_bytes_per_second: Links
    source: str = ""
    model: Model | None = None
    shared: tuple[Shared, ...] = ()

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(map(str, self.devices)).items() if count > 1]
        if twice:
            raise ConfigurationError(
                f"The device {twice[0]} appears {Counter(map(str, self.devices))[twice[0]]} times. Each host needs a "
                "name of its own (set SDPIPE_HOST where two machines share one), and each of its devices an index."
            )
        names = [str(device) for device in self.devices]
        _check("latency_seconds", self.latency_seconds, names, least="at least 0")
        _check("bandwidth_bytes_per_second", self.bandwidth_bytes_per_second, names, least="above 0")
        for a, (latencies, rates) in enumerate(zip(self.latency_seconds, self.bandwidth_bytes_per_second, strict=True)):
            for b, (latency, rate) in enumerate(zip(latencies, rates, strict=True)):
                if a != b and (latency is None) != (rate is None):
                    raise ConfigurationError(
                        f"The link from {names[a]} to {names[b]} has latency {latency} and bandwidth {rate}. Give "
                        "both, or null for both if no connection can be made."
                    )

    def __len__(self) -> int:
        return len(self.devices)

    def latency(self) -> Matrix:
        """Return the seconds of latency, the mean of both directions (DT-FM §2); infinite if a direction is missing."""
        return _symmetric(self.latency_seconds, math.inf)

    def bandwidth(self) -> Matrix:
        """Return bytes per second, the mean of both directions; 0 if a direction is missing. A link over a shared
        network card gets its share, since in training all links between two hosts are busy at the same time."""
        matrix = _symmetric(self.bandwidth_bytes_per_second, 0.0)
        shares = {frozenset(shared.hosts): shared.share for shared in self.shared}
        for a, row in enumerate(matrix):
            for b in range(len(row)) if shares else ():
                row[b] *= shares.get(frozenset((self.devices[a].host, self.devices[b].host)), 1.0)
        return matrix

    def unconnected(self) -> list[tuple[Device, Device]]:
        """Return the pairs of devices that cannot connect in at least one direction."""
        rows = self.latency_seconds
        return [
            (self.devices[a], self.devices[b])
            for a in range(len(self))
            for b in range(a + 1, len(self))
            if rows[a][b] is None or rows[b][a] is None
        ]


def _check(name: str, rows: Sequence[Sequence[float | None]], names: Sequence[str], *, least: str) -> None:
    count = len(names)
    if len(rows) != count or any(len(row) != count for row in rows):
        shape = f"{len(rows)} rows of {sorted({len(row) for row in rows})}"
        raise ConfigurationError(f"{name} has {shape} entries; {count} devices or sites need {count} rows of {count}.")
    for a, row in enumerate(rows):
        for b, value in enumerate(row):
            fits = value is None or (math.isfinite(value) and (value > 0 or (value == 0 and least == "at least 0")))
            if names[a] != names[b] and not fits:
                raise ConfigurationError(
                    f"{name} from {names[a]} to {names[b]} is {value}; it must be a number {least}, or null if no "
                    "connection can be made."
                )


def _symmetric(rows: Sequence[Sequence[float | None]], absent: float) -> Matrix:
    count = len(rows)
    matrix = [[0.0] * count for _ in range(count)]
    for a in range(count):
        for b in range(a):
            there, back = rows[a][b], rows[b][a]
            matrix[a][b] = matrix[b][a] = absent if there is None or back is None else (there + back) / 2
    return matrix


class _Site(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    devices: Annotated[int, msgspec.Meta(ge=1)]
    speed: Positive = 1.0
    memory_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None


class _Sites(msgspec.Struct, forbid_unknown_fields=True, tag_field="format", tag=SITES):
    source: str
    sites: list[_Site]
    latency_seconds: Links
    bandwidth_bytes_per_second: Links
    model: Model | None = None

    def expanded(self) -> Network:
        """Return the network with a row for each device."""
        names = [site.name for site in self.sites]
        _check("latency_seconds", self.latency_seconds, names, least="at least 0")
        _check("bandwidth_bytes_per_second", self.bandwidth_bytes_per_second, names, least="above 0")
        home = [number for number, site in enumerate(self.sites) for _ in range(site.devices)]
        latency, bandwidth = (
            [[rows[a][b] for b in home] for a in home]
            for rows in (self.latency_seconds, self.bandwidth_bytes_per_second)
        )
        devices = [Device(s.name, i, s.speed, s.memory_bytes) for s in self.sites for i in range(s.devices)]
        return Network(tuple(devices), latency, bandwidth, self.source, self.model)


def read_network(path: Path) -> Network:
    """Read a network from a file of either format.

    Raises:
        ConfigurationError: the file cannot be read, is of another version, or holds no network.
    """
    with os_errors_as(f"The network {path} cannot be read"):
        text = path.read_bytes()
    try:
        found = msgspec.json.decode(text, type=Network | _Sites)
        return found if isinstance(found, Network) else found.expanded()
    except (msgspec.DecodeError, ConfigurationError) as error:
        own = next((each for each in (error, error.__cause__) if isinstance(each, ConfigurationError)), None)
        reason = own or (
            f"this is not a network: {error}. Every device needs a host, an index and a speed, and the format is "
            f"{FORMAT} or {SITES}; docs/placement.md shows both."
        )
        raise ConfigurationError(f"{path}: {reason}") from error


def write_network(path: Path, network: Network) -> None:
    """Write ``sdpipe-network/1``, with one device or one row of a matrix per line."""
    plain = {"format": FORMAT, "source": network.source} | msgspec.to_builtins(network)
    path.write_text(one_row_per_line(plain), encoding="utf-8")
