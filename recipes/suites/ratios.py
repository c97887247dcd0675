"""Parts of a suite and what they report: rows of raw measurements, and ratios of two things that were measured in the
same run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from lightning_sdpipe.errors import ConfigurationError

Row = dict[str, Any]
Ratio = dict[str, Any]
Ratios = dict[str, Ratio]
Parts = Mapping[str, Callable[..., tuple[list[Row], Ratios]]]
Name = TypeVar("Name")


def run_parts(
    suite: str, parts: Parts, /, *, only: Sequence[str], seed: int, **arguments: Mapping[str, Any]
) -> tuple[list[Row], Ratios]:
    """Rows and ratios of those of ``parts`` that ``only`` names.

    Args:
        suite: its name, for messages.
        parts: by name.
        only: names of parts.
        seed: of all of them.
        arguments: of each part's ``measure``, by its name.

    Raises:
        ConfigurationError: a part that there is not.
    """
    refuse_unknown(f"a part of suite={suite}", (*only, *arguments), parts)
    rows: list[Row] = []
    ratios: Ratios = {}
    for name in only:
        own_rows, own_ratios = parts[name](**arguments[name], seed=seed)
        rows += own_rows
        ratios |= own_ratios
    return rows, ratios


def refuse_unknown(what: str, asked: Iterable[str], known: Collection[str]) -> None:
    """Refuse names that are not ``what``, for instance a part of a suite.

    Raises:
        ConfigurationError: says which names there are.
    """
    if unknown := [name for name in asked if name not in known]:
        raise ConfigurationError(f"{unknown[0]!r} is not {what}; there are {', '.join(known)}.")


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


def quotients(
    rows: Sequence[Row],
    column: str,
    above: tuple[str, ...],
    below: tuple[str, ...],
    names: Sequence[str] = ("what", "heterogeneity"),
    same: Sequence[str] = ("repeat",),
) -> list[float]:
    """Divide a column of one measurement by that of another, wherever both were made.

    Args:
        rows: measurements.
        column: a number; None is infinite above, and left out below.
        above: values of ``names`` of the one.
        below: likewise of the other.
        names: columns that tell measurements apart.
        same: columns in which both agree.
    """
    values = {(tuple(row[n] for n in names), tuple(row[n] for n in same)): row[column] for row in rows}
    return [
        (math.inf if value is None else value) / values[below, agreed]
        for (name, agreed), value in values.items()
        if name == above and values.get((below, agreed)) is not None
    ]


def rotated(names: Sequence[Name], repeat: int) -> list[Name]:
    """``names`` in the order of this repeat, so that each comes first equally often."""
    start = repeat % len(names)
    return [*names[start:], *names[:start]]
