"""What was measured is not measured again, and what was cut short is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.suites.journal import Journal

SETTING = {"versions": {"torch": "2"}}


def measure_into(taken: list[str], name: str) -> Any:
    def measure() -> dict[str, Any]:
        taken.append(name)
        return {"value": len(taken), "rest": [None, 0.5]}

    return measure


def test_a_second_run_resumes(tmp_path: Path) -> None:
    file, taken = tmp_path / "rows.jsonl", list[str]()
    first = Journal(file, SETTING)
    one = first.measured({"a": 1, "b": [2]}, measure_into(taken, "one"))
    first.measured({"a": 2, "b": [2]}, measure_into(taken, "two"))
    again = Journal(file, SETTING)
    assert again.measured({"b": [2], "a": 1}, measure_into(taken, "again")) == one
    assert again.measured({"a": 3}, measure_into(taken, "three"))["value"] == 3
    assert taken == ["one", "two", "three"]


def test_a_line_that_was_cut_short_costs_only_itself(tmp_path: Path) -> None:
    file, taken = tmp_path / "rows.jsonl", list[str]()
    journal = Journal(file, SETTING)
    for name in ("one", "two"):
        journal.measured({"name": name}, measure_into(taken, name))
    file.write_text(file.read_text()[:-5])
    for name in ("one", "two", "three"):
        Journal(file, SETTING).measured({"name": name}, measure_into(taken, f"{name} again"))
    assert taken == ["one", "two", "two again", "three again"]
    Journal(file, SETTING).measured({"name": "three"}, measure_into(taken, "never"))
    assert taken[-1] == "three again"


def test_other_versions_are_other_measurements(tmp_path: Path) -> None:
    file, taken = tmp_path / "rows.jsonl", list[str]()
    Journal(file, SETTING).measured({}, measure_into(taken, "old"))
    Journal(file, {"versions": {"torch": "3"}}).measured({}, measure_into(taken, "new"))
    assert taken == ["old", "new"]


def test_other_code_is_another_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, taken = tmp_path / "rows.jsonl", list[str]()
    Journal(file, SETTING).measured({}, measure_into(taken, "old"))
    monkeypatch.setattr("recipes.suites.journal.source_digest", lambda: "other")
    Journal(file, SETTING).measured({}, measure_into(taken, "new"))
    assert taken == ["old", "new"]


def test_without_a_file_nothing_outlives_the_run() -> None:
    taken: list[str] = []
    for _ in range(2):
        journal = Journal(None, SETTING)
        journal.measured({}, measure_into(taken, "each"))
        journal.measured({}, measure_into(taken, "never"))
    assert taken == ["each", "each"]
