"""Cost of observing a run, how often a slow worker is named, and whether its cost equals the gain of a run without
it."""

from __future__ import annotations

from functools import partial

from recipes.suites.grid import Parts, run_parts
from recipes.suites.seeing import named, overhead, simulated, viewers

LOWER_IS_BETTER = frozenset({"overhead", "accused", "viewers"})
PARTS: Parts = {
    "overhead": overhead.measure,
    "throughput": overhead.measure_throughput,
    "named": named.measure,
    "simulated": simulated.measure,
    "viewers": viewers.measure,
}
run = partial(run_parts, "seeing", PARTS)
