"""Reports of a suite: rows of raw measurements, and ratios of two things that were measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
Ratio = dict[str, Any]
Ratios = dict[str, Ratio]


def ratio(values: Sequence[float], goal: float | None, meaning: str) -> Ratio:
    """The median of ``values``, one per repeat, with their spread.

    Args:
        values: quotients; at least one.
        goal: what the value should reach, or stay below if the suite lists its key in ``LOWER_IS_BETTER``;
            None where it is measured to be known.
        meaning: what is divided by what.
    """
    return {
        "value": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "goal": goal,
        "meaning": meaning,
    }


def rotated(names: Sequence[str], repeat: int) -> list[str]:
    """``names`` in the order of this repeat, so that each comes first equally often."""
    start = repeat % len(names)
    return [*names[start:], *names[:start]]
