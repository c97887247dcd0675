"""Cost of seeing a run, how often a slow worker is named, and whether its cost is what a run without it gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.suites.parts import Parts, run_parts
from recipes.suites.ratios import Ratios, Row
from recipes.suites.seeing import named, overhead, simulated, viewers

LOWER_IS_BETTER = frozenset({"overhead", "accused", "viewers"})
PARTS: Parts = {
    "overhead": overhead.measure,
    "throughput": overhead.measure_throughput,
    "named": named.measure,
    "simulated": simulated.measure,
    "viewers": viewers.measure,
}


def run(*, only: Sequence[str], seed: int, **parts: Mapping[str, Any]) -> tuple[list[Row], Ratios]:
    """Rows and ratios of the parts that ``only`` names; ``parts`` are, by name, the arguments of their ``measure``."""
    return run_parts("seeing", PARTS, only, seed, parts)
