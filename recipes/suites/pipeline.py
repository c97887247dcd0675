"""The pipeline runtime against bare torch, against its own flush, and against one process; and what set-up takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.suites import bare_torch as bare_torch_
from recipes.suites import bubble
from recipes.suites import memory as memory_
from recipes.suites import rehearsal as rehearsal_
from recipes.suites.ratios import Ratios, Row

LOWER_IS_BETTER = frozenset({"memory", "rehearsal"})


def run(
    *,
    bare_torch: Mapping[str, Any],
    pipedream: Mapping[str, Any],
    memory: Mapping[str, Any],
    rehearsal: Mapping[str, Any],
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Rows and ratios of all parts; the mappings are arguments of their ``measure``."""
    parts = [
        bare_torch_.measure(**bare_torch, seed=seed),
        bubble.measure(**pipedream, seed=seed),
        memory_.measure(**memory, seed=seed),
        rehearsal_.measure(**rehearsal, seed=seed),
    ]
    rows = [row for part, _ in parts for row in part]
    return rows, {key: value for _, part in parts for key, value in part.items()}
