"""The pipeline runtime against bare torch, against its own flush, against one process, and against Lightning's DDP; and
what set-up takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.suites.parts import Parts, run_parts
from recipes.suites.pipeline import bare_torch, bubble, group_mean, memory, rehearsal, step_cost
from recipes.suites.ratios import Ratios, Row

LOWER_IS_BETTER = frozenset({"exchange", "memory", "rehearsal", "step_cost"})
PARTS: Parts = {
    "bare_torch": bare_torch.measure,
    "pipedream": bubble.measure,
    "memory": memory.measure,
    "rehearsal": rehearsal.measure,
    "group_mean": group_mean.measure,
    "step_cost": step_cost.measure,
}


def run(*, only: Sequence[str], seed: int, **parts: Mapping[str, Any]) -> tuple[list[Row], Ratios]:
    """Rows and ratios of the parts that ``only`` names; ``parts`` are, by name, the arguments of their ``measure``."""
    return run_parts("pipeline", PARTS, only, seed, parts)
