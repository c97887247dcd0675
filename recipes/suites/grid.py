"""Parts of a suite and what they report: rows of raw measurements, and ratios of two things measured in the same
run."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lightning_sdpipe.errors import ConfigurationError
from recipes.suites import machine

Row = dict[str, Any]
Ratio = dict[str, Any]
Ratios = dict[str, Ratio]
Parts = Mapping[str, Callable[..., tuple[list[Row], Ratios]]]
Name = TypeVar("Name")
_ROOT = Path(__file__).parents[2]


class Goal(NamedTuple):
    """A ratio and its goal.

    Args:
        meaning: the ratio and its terms, in words.
        column: column of the rows; None in it counts as infinite in the numerator, and is left out in the denominator.
        above: values of columns that select the rows of the numerator.
        below: values of columns that select the rows of the denominator; or another column of the same row.
        value: the goal, which the ratio should reach, or not exceed if the suite lists its key in ``LOWER_IS_BETTER``;
            None if it is measured for information only.
    """

    meaning: str
    column: str
    above: Row
    below: Row | str
    value: float | None = None


def versus(meaning: str, column: str, one: str, other: str, value: float | None = None, **where: Any) -> Goal:
    """Return the goal for the ratio of ``one`` to ``other`` in a column.

    Args:
        meaning: as for :class:`Goal`; ``{one}`` and ``{other}`` stand for their names.
        column: see :class:`Goal`.
        one: the numerator's value of the column ``what``.
        other: the denominator's value of the column ``what``.
        value: see :class:`Goal`.
        where: values of columns in which both rows agree.
    """
    above, below = ({"what": what} | where for what in (one, other))
    return Goal(meaning.format(one=one, other=other), column, above, below, value)


class Case(NamedTuple):
    """One measurement of a grid.

    Args:
        columns: the first columns of its row, which distinguish it.
        asked: a dataclass of plain values that determines the measurement.
    """

    columns: Row
    asked: Any


class Grid:
    """Measures cases one after the other; finished ones survive an interruption.

    Each is a line of a file, and is reused if ``asked``, the versions, the machine and the source code are the same.

    Args:
        output: the file of the results, beside which the lines are kept; None to keep nothing.
    """

    def __init__(self, output: str | None = None) -> None:
        self._path = None if output is None else Path(output).with_suffix(".rows.jsonl")
        self._setting = {**machine.setting(), "source": source_digest()}
        self._found: dict[str, Row] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                with suppress(ValueError):  # an empty line, or one that an interruption cut short
                    entry = json.loads(line)
                    if entry["setting"] == self._setting:
                        self._found[json.dumps(entry["asked"], sort_keys=True)] = entry["row"]

    def run(self, cases: Iterable[Case], measure: Callable[[Any], Row], shown: str) -> list[Row]:
        """Return each case's row, its columns and what ``measure`` returns, and print its column ``shown``."""
        rows = []
        for case in cases:
            print(", ".join(f"{name} {value}" for name, value in case.columns.items()), end=": ", flush=True)
            start = time.perf_counter()
            rows.append(case.columns | self.measured(case.asked, measure))
            print(f"{shown} {rows[-1][shown]:.4g} ({time.perf_counter() - start:.0f} s)", flush=True)
        return rows

    def measured(self, asked: Any, measure: Callable[[Any], Row]) -> Row:
        """Return what ``measure(asked)`` returns, plain values, or returned before for the same ``asked``."""
        if not self.has(asked):
            self.keep(asked, measure(asked))
        return self._found[_key(asked)]

    def has(self, asked: Any) -> bool:
        """Return whether ``asked`` has been measured."""
        return _key(asked) in self._found

    def keep(self, asked: Any, row: Row) -> None:
        """Keep ``row`` as the measurement of ``asked``."""
        self._found[_key(asked)] = row
        if self._path is not None:
            entry = json.dumps({"asked": asdict(asked), "setting": self._setting, "row": row})
            with self._path.open("a") as file:
                file.write(f"\n{entry}")  # begins a new line, even after one that was cut short


def _key(asked: Any) -> str:
    return json.dumps(asdict(asked), sort_keys=True)


def source_digest() -> str:
    """Return a digest of the code of the package, the recipes and their configuration."""
    digest = hashlib.sha256()
    for directory, pattern in (("lightning_sdpipe", "*.py"), ("recipes", "*.py"), ("conf", "*.yaml")):
        for file in sorted((_ROOT / directory).rglob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def turns(
    repeats: int, compared: Mapping[str, Sequence[str]], once: Collection[str] = ()
) -> Iterator[tuple[int, str, str]]:
    """Yield repeat, condition and name: in each repeat, all names ``compared`` under each condition, in rotated order;
    conditions in ``once`` only in the first repeat."""
    for repeat in range(repeats):
        for condition, names in compared.items():
            if not (repeat and condition in once):
                for name in rotated(names, repeat):
                    yield repeat, condition, name


def compared(work: Mapping[str, Callable[[], Row]], repeats: int) -> list[Row]:
    """Run each of ``work`` in each repeat, in rotated order; return the rows, with their names and repeats."""
    return [{"what": name, "repeat": repeat} | work[name]() for repeat, name in in_turn([*work], repeats)]


def in_turn(names: Sequence[Name], repeats: int) -> Iterator[tuple[int, Name]]:
    """Yield each repeat with each of ``names``, in rotated order."""
    for repeat in range(repeats):
        for name in rotated(names, repeat):
            yield repeat, name


def rotated(names: Sequence[Name], repeat: int) -> list[Name]:
    """Return ``names`` in this repeat's order; over the repeats, each comes first equally often."""
    start = repeat % len(names)
    return [*names[start:], *names[:start]]


def ratios(rows: Sequence[Row], goals: Mapping[str, Goal], same: Sequence[str] = ("repeat",)) -> Ratios:
    """Return the ratios of the goals that were measured, by key.

    Args:
        rows: measurements.
        goals: goals by key.
        same: columns in which both rows of a quotient agree.
    """
    found: Ratios = {}
    for key, goal in goals.items():
        if values := quotients(rows, goal, same):
            found[key] = ratio(values, goal.value, goal.meaning)
    return found


def quotients(rows: Sequence[Row], goal: Goal, same: Sequence[str] = ("repeat",)) -> list[float]:
    """Return the quotients of a goal for which both rows were measured."""
    above = chosen(rows, **goal.above)
    if isinstance(goal.below, str):
        pairs = [(row[goal.column], row[goal.below]) for row in above]
    else:
        below = {tuple(row[name] for name in same): row[goal.column] for row in chosen(rows, **goal.below)}
        pairs = [(row[goal.column], below.get(tuple(row[name] for name in same))) for row in above]
    return [(math.inf if one is None else one) / other for one, other in pairs if other is not None]


def chosen(rows: Iterable[Row], **columns: Any) -> list[Row]:
    """Return the rows with these values in their columns."""
    return [row for row in rows if all(row.get(name) == value for name, value in columns.items())]


def values(rows: Iterable[Row], column: str) -> list[Any]:
    """Return the distinct values of a column, in order."""
    return list(dict.fromkeys(row[column] for row in rows if column in row))


def ratio(values: Sequence[float], goal: float | None, meaning: str) -> Ratio:
    """Return the median of ``values``, one quotient for each repeat, with their spread; see :class:`Goal`."""
    low, high = min(values), max(values)
    return {"value": statistics.median(values), "low": low, "high": high, "goal": goal, "meaning": meaning}


def shown(value: Any) -> str:
    """Return the text of a value in a table."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return ", ".join(map(shown, value)) if isinstance(value, list | tuple) else "-" if value is None else str(value)


def run_parts(
    suite: str, parts: Parts, /, *, only: Sequence[str], seed: int, **arguments: Mapping[str, Any]
) -> tuple[list[Row], Ratios]:
    """Return the rows and ratios of the ``parts`` that ``only`` names.

    Args:
        suite: name of the suite, for messages.
        parts: parts by name.
        only: names of parts.
        seed: seed of all parts.
        arguments: arguments of each part's ``measure``, by the part's name.

    Raises:
        ConfigurationError: ``only`` or ``arguments`` names an unknown part.
    """
    refuse_unknown(f"a part of suite={suite}", (*only, *arguments), parts)
    rows: list[Row] = []
    found: Ratios = {}
    for name in only:
        own_rows, own_ratios = parts[name](**arguments[name], seed=seed)
        rows += own_rows
        found |= own_ratios
    return rows, found


def refuse_unknown(what: str, asked: Iterable[str], known: Collection[str]) -> None:
    """Refuse names that are not ``what``, for example a part of a suite.

    Raises:
        ConfigurationError: a name is unknown; the message lists the known ones.
    """
    if unknown := [name for name in asked if name not in known]:
        raise ConfigurationError(f"{unknown[0]!r} is not {what}; there are {', '.join(known)}.")
