"""What it costs to exchange models: writing and reading their messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.suites import codecs as codecs_
from recipes.suites.ratios import Ratios, Row

LOWER_IS_BETTER = frozenset({"codec"})


def run(*, codecs: Mapping[str, Any], seed: int) -> tuple[list[Row], Ratios]:
    """Rows and ratios of all parts; the mappings are arguments of their ``measure``."""
    return codecs_.measure(**codecs, seed=seed)
