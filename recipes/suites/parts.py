"""Suites that are made of parts, each with a ``measure`` of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightning_sdpipe.errors import ConfigurationError
from recipes.suites.ratios import Ratios, Row

Parts = Mapping[str, Callable[..., tuple[list[Row], Ratios]]]


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
    check_parts(suite, (*only, *arguments), parts)
    rows: list[Row] = []
    ratios: Ratios = {}
    for name in only:
        own_rows, own_ratios = parts[name](**arguments[name], seed=seed)
        rows += own_rows
        ratios |= own_ratios
    return rows, ratios


def check_parts(suite: str, only: Iterable[str], parts: Iterable[str]) -> None:
    """Refuse a part that there is not.

    Raises:
        ConfigurationError: says which parts there are.
    """
    known = list(parts)
    if unknown := [name for name in only if name not in known]:
        raise ConfigurationError(f"{unknown[0]!r} is not a part of suite={suite}; there are {', '.join(known)}.")
