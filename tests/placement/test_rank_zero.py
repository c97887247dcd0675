"""Rank 0 runs a last stage, and what that costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_sdpipe.placement.model import even_stages
from lightning_sdpipe.placement.planner import PlacementTask, place
from lightning_sdpipe.placement.report import report
from tests.placement.sites import network_of_sites

ASKED = PlacementTask(8, "dtfm", 1, "all_reduce", moves=500)


def test_its_price_is_that_of_the_nearest_placement() -> None:
    """b lies between a and c, so b is in the middle; rank 0 is b, or not."""
    rows = [[0.0, 1.0, 1.0], [1.0, 0.0, 5.0], [1.0, 5.0, 0.0]]
    network = network_of_sites([("b", 1), ("a", 1), ("c", 1)], rows, [[1e6] * 3] * 3)
    asked = replace(ASKED, num_stages=3)
    placed = place(network, asked, even_stages(3, 0.0, 0.0))
    assert placed.first == 0
    assert (placed.layout.rows[0][-1], placed.seconds, placed.price) == (0, pytest.approx(12.0), pytest.approx(8.0))
    assert placed.free_hosts == ["a", "c"]
    assert "which costs 8.00 s; start the run with host a or c first" in report(placed)
    assert "which costs 8.00 s\n" in f"{report(replace(placed, free_hosts=[]))}\n", "as on a single machine"
    free = place(network, replace(asked, first=1), even_stages(3, 0.0, 0.0))
    assert (free.layout.rows, free.seconds, free.price) == (((2, 0, 1),), pytest.approx(4.0), 0.0)
