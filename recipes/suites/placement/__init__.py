"""Placement: the search against known optima and DT-FM's, and what a placement gains on slow links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.suites.grid import Ratios, Row
from recipes.suites.placement import search as placed_search
from recipes.suites.placement import throughput as placed_throughput

LOWER_IS_BETTER = frozenset({"optimum"})


def run(*, search: Mapping[str, Any], throughput: Mapping[str, Any], seed: int) -> tuple[list[Row], Ratios]:
    """Return rows and ratios of both; the mappings are arguments of their ``measure``."""
    rows, ratios = placed_throughput.measure(**throughput, seed=seed)  # first: it forks
    more_rows, more_ratios = placed_search.measure(**search, seed=seed)
    return [*rows, *more_rows], ratios | more_ratios
