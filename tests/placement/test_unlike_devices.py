"""The tables of docs/unlike_devices.md are what the search finds.

``python -m tests.placement.test_unlike_devices`` writes them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from lightning_sdpipe import Balanced, SDPipeStrategy
from lightning_sdpipe.placement.planner import PlacementResult, PlacementTask, place_freely
from lightning_sdpipe.placement.rate import Sync
from tests.placement.fleets import FLEETS, MICRO_BATCHES

PAGE = Path(__file__).parents[2] / "docs" / "unlike_devices.md"
SHOWN = {
    "1 at 1 (48) + 4 at 1/2 (24)": "2.0e9",
    "A6000 + 2 3090 + 2 4060 Ti": "1.8e9",
    "5090 + 4090 + 3090": "1.6e9",
    "5 equal (24)": "2.0e9",
    "2 A100 + 2 3090 + 2 V100": "2.5e9",
    "5090 + 4060 Ti": "1.1e9",
}
"""Six fleets, and the parameters of the model."""
MOVES = 10_000
ALL_REDUCE = ("1 at 1 (48) + 4 at 1/2 (24)", "5090 + 4090 + 3090", "5 equal (24)")


def passed(found: PlacementResult) -> str:
    cut = found.blocks[0] if found.layout.alike else found.blocks
    return f"`num_stages={found.num_stages}, partition={cut}`"


def pipelines(found: PlacementResult) -> str:
    """Their devices, by stage."""
    return "; ".join(", ".join(found.network.devices[device].host for device in row) for row in found.layout.rows)


def fleet_of(name: str) -> str:
    devices = FLEETS[name].devices
    kinds = {device.host: device for device in devices}
    counts = {host: sum(device.host == host for device in devices) for host in kinds}
    return ", ".join(f"{counts[h]} {h}: {d.speed:g}, {(d.memory_bytes or 0) / 1e9:g} GB" for h, d in kinds.items())


def row(name: str, sync: Sync) -> str:
    asked = replace(PlacementTask(1, num_micro_batches=MICRO_BATCHES, moves=MOVES), sync=sync)
    tried, _ = place_freely(FLEETS[name], asked)
    rectangle = max((each for each in tried if each.layout.alike), key=lambda each: each.rate)
    found = max(tried, key=lambda each: each.rate)
    times = found.rate / rectangle.rate
    parameters = f" {SHOWN[name]} |" if sync == "groups" else ""
    told = f"{found.rate:.2f} | {rectangle.rate:.2f} ({rectangle.shape}) | {times:.2f} |"
    return f"| {fleet_of(name)} |{parameters} {pipelines(found)} | {passed(found)} | {told}"


def tables() -> list[list[str]]:
    return [[row(name, "groups") for name in SHOWN], [row(name, "all_reduce") for name in ALL_REDUCE]]


def test_the_tables_are_what_is_found() -> None:
    text = PAGE.read_text()
    for table in tables():
        assert "|---|\n" + "\n".join(table) + "\n\n" in text, "python -m tests.placement.test_unlike_devices"


def test_what_is_to_be_passed_can_be() -> None:
    calls = re.findall(r"`num_stages=(.*), partition=(.*)`", PAGE.read_text())
    assert len(calls) == len(SHOWN) + len(ALL_REDUCE)
    for stages, cut in calls:
        SDPipeStrategy(num_stages=eval(stages), num_micro_batches=MICRO_BATCHES, partition=eval(cut))
    SDPipeStrategy(num_stages=[1, 2], partition=Balanced(speeds=[[1], [0.5, 0.5]]))


if __name__ == "__main__":
    anew = iter(tables())
    PAGE.write_text(re.sub(r"(\|---\|\n)(?:\|.*\n)+", lambda m: m[1] + "\n".join(next(anew)) + "\n", PAGE.read_text()))
