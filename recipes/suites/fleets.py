"""Fleets of devices that are not alike, and the pipelines that placement makes of them.

Their speeds and memories are assumed. The blocks of the model are equal and take a second together on a device of speed
1; averaging takes nothing, so that what a placement predicts is what pipelines make that never wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.model import Block, Model
from lightning_sdpipe.placement.network import Device, Network
from lightning_sdpipe.placement.planner import PlacementResult, PlacementTask, place_freely
from lightning_sdpipe.placement.rate import Sync

BYTES_PER_SECOND = 1e20
"""Of all links: so many that parameters take no time. Activations are as many more as a cut shall take."""

STATE_BYTES = 4
"""Of a parameter; placement adds those of its gradient and of Adam's two moments."""

MOVES = 8_000
"""Moves of a search."""


@dataclass(frozen=True)
class Shape:
    """A shape says into which pipelines a fleet falls.

    Args:
        cuts: the numbers of blocks of each pipeline, by stage.
        factors: how many times slower than a device of speed 1 that of each rank is.
        rate: mini-batches of all pipelines, for each that a device of speed 1 could make.
        left_out: how many devices run nothing.
        search_seconds: of processor time, until it was found.
    """

    cuts: tuple[tuple[int, ...], ...]
    factors: tuple[float, ...]
    rate: float = 0.0
    left_out: int = 0
    search_seconds: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """``num_stages`` and ``partition``, as a user gives them."""
        if len(set(self.cuts)) == 1:
            return {"num_stages": len(self.cuts[0]), "partition": list(self.cuts[0])}
        return {"num_stages": [len(cut) for cut in self.cuts], "partition": [list(cut) for cut in self.cuts]}

    def __str__(self) -> str:
        return " ".join(str(list(cut)) for cut in self.cuts)


def network(fleet: Mapping[str, Any], blocks: int, micro_batches: int, cut: float, kept: float) -> Network:
    """Return the devices of a fleet with a model.

    Args:
        fleet: its ``parameters``, and by name of its ``devices`` how many there are (``count``), their ``speed`` and
            the ``gigabytes`` that training may use of each.
        blocks: of the model.
        micro_batches: of a mini-batch.
        cut: seconds that the messages of a mini-batch over a cut take, both ways.
        kept: bytes that are kept for each parameter and micro-batch, from its forward to its backward.
    """
    parameters = fleet["parameters"]
    devices = [
        Device(name, number, float(kind["speed"]), int(kind["gigabytes"] * 1e9))
        for name, kind in fleet["devices"].items()
        for number in range(kind["count"])
    ]
    passed = int(cut * BYTES_PER_SECOND / 2)
    block = Block(
        1 / blocks,
        int(STATE_BYTES * parameters / blocks),
        passed,
        passed,
        saved_bytes=int(kept * parameters * micro_batches / blocks),
        count=blocks,
    )
    latency, bandwidth = ([[value] * len(devices)] * len(devices) for value in (0.0, BYTES_PER_SECOND))
    return Network(tuple(devices), latency, bandwidth, "assumed", Model(f"{blocks} blocks", (block,)))


def shapes(found: Network, micro_batches: int, sync: Sync) -> dict[str, Shape]:
    """Find the pipelines that make most: ``"ragged"`` ones of any depth, and a ``"rectangle"`` of one depth and cut.
    Devices may be left out.

    Raises:
        ConfigurationError: there is no rectangle.
    """
    started = time.process_time()
    results, _ = place_freely(found, PlacementTask(1, num_micro_batches=micro_batches, sync=sync, moves=MOVES))
    spent = time.process_time() - started
    alike = [result for result in results if result.layout.alike]
    if not alike:
        raise ConfigurationError("The model of suite.fleets fits into no equal pipelines of its devices.")
    best = {"ragged": results, "rectangle": alike}
    return {mesh: _shape(max(among, key=lambda result: result.rate), spent) for mesh, among in best.items()}


def _shape(result: PlacementResult, seconds: float) -> Shape:
    ranks = [device for row in result.layout.rows for device in reversed(row)]  # the last stage first
    factors = tuple(1.0 / result.network.devices[device].speed for device in ranks)
    cuts = tuple(map(tuple, result.blocks))
    return Shape(cuts, factors, result.rate, len(result.left_out), seconds)
