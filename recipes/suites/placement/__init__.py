"""Placement: the search against known optima and DT-FM's, and what a placement gains on slow links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.suites.placement import search as placed_search
from recipes.suites.placement import shaped_links
from recipes.suites.placement import throughput as placed_throughput
from recipes.suites.ratios import Ratios, Row

LOWER_IS_BETTER = frozenset({"optimum"})


def run(
    *, search: Mapping[str, Any], throughput: Mapping[str, Any], shaped: Mapping[str, Any], seed: int
) -> tuple[list[Row], Ratios]:
    """Rows and ratios of all parts; the mappings are arguments of their ``measure``."""
    parts = [
        placed_throughput.measure(**throughput, seed=seed),  # first: it forks
        (shaped_links.measure(**shaped), {}),
        placed_search.measure(**search, seed=seed),
    ]
    rows = [row for part, _ in parts for row in part]
    return rows, {key: value for _, part in parts for key, value in part.items()}
