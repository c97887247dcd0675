"""Adam's variance correction: what it does to the training of averaged models, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.suites.ratios import Ratios, Row
from recipes.suites.variance import averaged_bert
from recipes.suites.variance import overhead as overhead_

LOWER_IS_BETTER = frozenset({"overhead"})


def run(*, training: Mapping[str, Any], overhead: Mapping[str, Any], seed: int) -> tuple[list[Row], Ratios]:
    """Rows of both and the ratio; the mappings are arguments of their ``measure``."""
    timings, ratios = overhead_.measure(**overhead, seed=seed)  # first: it wants a process that has done nothing yet
    return [*timings, *averaged_bert.measure(**training, seed=seed)], ratios
