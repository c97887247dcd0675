"""Arithmetic of all suites: goals, the order of cases, and measurements that survive an interruption."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_sdpipe.errors import ConfigurationError
from recipes.suites import grid
from recipes.suites.grid import Case, Goal, Grid, ratio, ratios, refuse_unknown, rotated, run_parts, turns


def row(what: str, repeat: int, value: float | None, **more: Any) -> dict[str, Any]:
    return {"what": what, "repeat": repeat, "value": value, **more}


GOAL = Goal("a over b", "value", {"what": "a"}, {"what": "b"}, 2.0)


def test_every_quotient_is_of_the_same_repeat() -> None:
    rows = [row("a", 0, 6.0), row("a", 1, 10.0), row("b", 1, 2.0), row("b", 0, 3.0), row("a", 2, 1.0)]
    found = ratios(rows, {"a/b": GOAL, "a/c": GOAL._replace(below={"what": "c"})})
    assert found == {"a/b": {"value": 3.5, "low": 2.0, "high": 5.0, "goal": 2.0, "meaning": "a over b"}}
    apart = [{**each, "panel": number} for number, each in enumerate(rows)]
    assert ratios(apart, {"a/b": GOAL}, ("repeat", "panel")) == {}


def test_what_was_never_reached_is_infinite_above_and_left_out_below() -> None:
    rows = [row("a", 0, None), row("b", 0, 1.0), row("a", 1, 4.0), row("b", 1, None)]
    assert grid.quotients(rows, GOAL) == [math.inf]


def test_a_goal_may_divide_two_columns_of_a_row() -> None:
    rows = [row("a", 0, 6.0, most=12.0), row("a", 1, 6.0, most=None), row("b", 0, 6.0, most=1.0)]
    assert grid.quotients(rows, GOAL._replace(below="most")) == [0.5]


def test_a_value_is_the_median_of_the_repeats() -> None:
    value = {"value": 2.0, "low": 1.0, "high": 3.0, "goal": None, "meaning": "a over b"}
    assert ratio([3.0, 1.0, 2.0], None, "a over b") == value


def test_every_name_comes_first_in_turn() -> None:
    assert [rotated(["a", "b", "c"], repeat)[0] for repeat in range(4)] == ["a", "b", "c", "a"]
    assert [*turns(2, {"none": ["x", "y"], "slow": ["x"]}, once=["slow"])] == [
        *((0, "none", "x"), (0, "none", "y"), (0, "slow", "x")),
        *((1, "none", "y"), (1, "none", "x")),
    ]


def test_names_that_there_are_not_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(ConfigurationError, match="'c' is not a letter; there are a, b"):
        refuse_unknown("a letter", ["a", "c"], ["a", "b"])
    with pytest.raises(ConfigurationError, match="'two' is not a part of suite=x; there are one"):
        run_parts("x", {"one": lambda **_: pytest.fail("measured")}, only=["one", "two"], seed=0, one={})


def test_parts_are_put_together() -> None:
    parts = {name: lambda seed, name=name: ([{"what": name}], {name: ratio([seed], 1, "")}) for name in "ab"}
    rows, found = run_parts("x", parts, only=["b", "a"], seed=3, a={}, b={})
    assert [row["what"] for row in rows] == [*found] == ["b", "a"]


@dataclass(frozen=True)
class Asked:
    name: str


def measured(output: Path | None, *names: str) -> list[str]:
    """The names that had to be measured."""
    taken: list[str] = []

    def measure(asked: Asked) -> dict[str, Any]:
        taken.append(asked.name)
        return {"value": len(asked.name), "rest": [None, 0.5]}

    made = Grid(None if output is None else str(output))
    rows = made.run([Case({"what": name}, Asked(name)) for name in names], measure, "value")
    assert rows == [{"what": name, "value": len(name), "rest": [None, 0.5]} for name in names]
    return taken


def test_a_second_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.json"
    assert measured(output, "one", "two", "one") == ["one", "two"]
    assert measured(output, "two", "three") == ["three"]
    lines = output.with_suffix(".rows.jsonl")
    lines.write_text(lines.read_text()[:-5])  # cut short
    assert measured(output, "one", "two", "three") == ["three"]
    monkeypatch.setattr(grid, "source_digest", lambda: "other")
    assert measured(output, "one") == ["one"], "of other code"
    assert measured(None, "one") == ["one"]
