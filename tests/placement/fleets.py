"""Fleets of devices that are not alike, by arithmetic.

26 equal blocks take one second together on a device of speed 1; 16 bytes of states per parameter; on all links a cut
costs a hundredth of the work, and averaging nothing. Speeds are assumed, and memory is what training may use of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sdpipe.placement.model import Block, Model
from lightning_sdpipe.placement.network import Device, Network

RATE = 1e20
"""Bytes per second: so many that parameters count for nothing; activations make up for it."""

MICRO_BATCHES = 8


@dataclass(frozen=True)
class Devices:
    """``count`` devices that are alike, on a host of their own; ``gigabytes`` of 1e9 bytes."""

    host: str
    count: int
    speed: float
    gigabytes: float


def fleet(
    classes: list[Devices], parameters: float, blocks: int = 26, saved: float = 0.02, cut: float = 0.01
) -> Network:
    """The devices with links and a model of so many parameters, whose blocks keep ``saved`` bytes for each of them and
    micro-batch; passing a cut both ways takes ``cut`` seconds."""
    devices = [
        Device(each.host, i, each.speed, int(each.gigabytes * 1e9)) for each in classes for i in range(each.count)
    ]
    block = Block(
        1 / blocks,
        int(4 * parameters / blocks),
        int(cut * RATE / 2),
        int(cut * RATE / 2),
        saved_bytes=int(saved * parameters * MICRO_BATCHES / blocks),
        count=blocks,
    )
    links = [[0.0] * len(devices)] * len(devices), [[RATE] * len(devices)] * len(devices)
    return Network(tuple(devices), *links, "by arithmetic", Model(f"{blocks} blocks", (block,)))


A100, V100 = Devices("a100", 2, 1.0, 76), Devices("v100", 2, 0.42, 30)

FLEETS = {
    "1 at 1 (48) + 4 at 1/2 (24)": fleet([Devices("large", 1, 1.0, 46), Devices("small", 4, 0.5, 22.5)], 2.0e9),
    "A6000 + 2 3090 + 2 4060 Ti": fleet(
        [Devices("a6000", 1, 0.55, 46), Devices("3090", 2, 0.45, 22.5), Devices("4060ti", 2, 0.22, 15)], 1.8e9
    ),
    "5090 + 4090 + 3090": fleet(
        [Devices("5090", 1, 1.0, 30), Devices("4090", 1, 0.75, 22.5), Devices("3090", 1, 0.45, 22.5)], 1.6e9
    ),
    "5 equal (24)": fleet([Devices("equal", 5, 1.0, 22.5)], 2.0e9),
    "2 A100 + 2 3090 + 2 V100": fleet([A100, Devices("3090", 2, 0.45, 22.5), V100], 2.5e9),
    "5090 + 4060 Ti": fleet([Devices("5090", 1, 1.0, 30), Devices("4060ti", 1, 0.22, 15)], 1.1e9),
}
