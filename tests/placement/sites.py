"""Networks of sites, as a user writes them by hand."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lightning_sdpipe.placement.network import SITES, Network, read_network


def network_of_sites(
    sites: Sequence[tuple[str, int]],
    latency_seconds: Sequence[Sequence[float | None]],
    bandwidth_bytes_per_second: Sequence[Sequence[float | None]],
) -> Network:
    """Of sites with so many devices each, from the links between sites (on the diagonal: within)."""
    file = {
        "format": SITES,
        "source": "",
        "sites": [{"name": name, "devices": count} for name, count in sites],
        "latency_seconds": latency_seconds,
        "bandwidth_bytes_per_second": bandwidth_bytes_per_second,
    }
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "sites.json")
        path.write_text(json.dumps(file))
        return read_network(path)
