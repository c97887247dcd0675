"""Viewers that have asked and do not read, and how long workers wait for their answers meanwhile."""

from __future__ import annotations

import pytest

from recipes.suites.seeing.viewers import measure


@pytest.mark.distributed
def test_workers_are_answered_while_viewers_do_not_read() -> None:
    rows, ratios = measure(clients=4, viewers=3, signals=64, repeats=1, seed=0, filled=1 << 16)
    assert sorted(row["viewers"] for row in rows) == [0, 3]
    assert all(row["p99_us"] > 0 for row in rows)
    assert ratios["viewers"]["goal"] == 1.1
    assert ratios["viewers"]["value"] > 0
