"""What it costs to exchange models, and what it gains: writing and reading messages, and training over slow links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_sdpipe.errors import ConfigurationError
from recipes.suites import busy_link, codecs, slow_links
from recipes.suites.ratios import Ratios, Row

LOWER_IS_BETTER = frozenset({"codec"})
PARTS: Mapping[str, Callable[..., tuple[list[Row], Ratios]]] = {
    "codecs": codecs.measure,
    "slow_links": slow_links.measure,
    "busy_link": busy_link.measure,
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
        raise ConfigurationError(f"{unknown[0]!r} is not a part of suite=exchange; there are {', '.join(PARTS)}.")
    rows: list[Row] = []
    ratios: Ratios = {}
    for name in only:
        own_rows, own_ratios = PARTS[name](**parts[name], seed=seed)
        rows += own_rows
        ratios |= own_ratios
    return rows, ratios
