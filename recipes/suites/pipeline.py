"""The pipeline runtime against bare torch, against its own flush, against one process, and against Lightning's DDP; and
what set-up takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_sdpipe.errors import ConfigurationError
from recipes.suites import bare_torch, bubble, group_mean, memory, rehearsal, step_cost
from recipes.suites.ratios import Ratios, Row

LOWER_IS_BETTER = frozenset({"exchange", "memory", "rehearsal", "step_cost"})
PARTS: Mapping[str, Callable[..., tuple[list[Row], Ratios]]] = {
    "bare_torch": bare_torch.measure,
    "pipedream": bubble.measure,
    "memory": memory.measure,
    "rehearsal": rehearsal.measure,
    "group_mean": group_mean.measure,
    "step_cost": step_cost.measure,
}


def run(*, only: Sequence[str], seed: int, **parts: Mapping[str, Any]) -> tuple[list[Row], Ratios]:
    """Rows and ratios of the parts that ``only`` names.

    Args:
        only: names of parts.
        seed: of all of them.
        parts: by name, the arguments of their ``measure``.

    Raises:
        ConfigurationError: a part that there is not.
    """
    if unknown := [name for name in (*only, *parts) if name not in PARTS]:
        raise ConfigurationError(f"{unknown[0]!r} is not a part of suite=pipeline; there are {', '.join(PARTS)}.")
    rows: list[Row] = []
    ratios: Ratios = {}
    for name in only:
        own_rows, own_ratios = PARTS[name](**parts[name], seed=seed)
        rows += own_rows
        ratios |= own_ratios
    return rows, ratios
