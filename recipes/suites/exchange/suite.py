"""Cost and gain of exchanging models: writing and reading messages, and training over slow links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.suites.exchange import ablations, busy_link, codecs, copies, slow_links, slow_trainings
from recipes.suites.parts import Parts, run_parts
from recipes.suites.ratios import Ratios, Row

LOWER_IS_BETTER = frozenset({"codec"})
PARTS: Parts = {
    "codecs": codecs.measure,
    "copies": copies.measure,
    "slow_links": slow_links.measure,
    "ablations": ablations.measure,
    "slow_trainings": slow_trainings.measure,
    "busy_link": busy_link.measure,
}


def run(*, only: Sequence[str], seed: int, **parts: Mapping[str, Any]) -> tuple[list[Row], Ratios]:
    """Rows and ratios of the parts that ``only`` names; ``parts`` are, by name, the arguments of their ``measure``."""
    return run_parts("exchange", PARTS, only, seed, parts)
