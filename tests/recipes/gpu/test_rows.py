"""Rows that fail, hang, die or cannot be tried here do not keep the others from being tried and written down."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.gpu.rows import NotPossible, Report, Row, Values, attempt, run
from recipes.gpu.running import Machine
from tests.patience import until


def row(work: Callable[[Machine], Values], seconds: float = 1800.0, **goals: float) -> Row:
    return Row(work.__name__, work, seconds, goals)


def measures(machine: Machine) -> Values:
    return {"quick": 1.0, "slow": 5.0, "of each": [1, 2.5], "how": "a | b"}


def fails(machine: Machine) -> Values:
    raise ValueError("the third\nis wrong")


def dies(machine: Machine) -> Values:
    os._exit(3)


def cannot(machine: Machine) -> Values:
    raise NotPossible("it takes two")


def hangs(machine: Machine) -> Values:
    child = subprocess.Popen(["sleep", "1000"])
    (machine.folder / "child").write_text(str(child.pid))
    return {"never": child.wait()}


def reads(machine: Machine) -> Values:
    return {"rows": len(json.loads((machine.folder / "gpu-report.json").read_text())["rows"])}


def runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_each_row_is_written_down_before_the_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path, {"device": "none"})
    rows = [row(measures, quick=2.0, slow=2.0), row(fails), row(dies), row(cannot), row(reads)]
    run(rows, Machine("cpu", 0, tmp_path), report, 1800)
    written = json.loads((tmp_path / "gpu-report.json").read_text())
    assert written["device"] == "none"
    assert [each["result"] for each in written["rows"]] == ["passed", "failed", "failed", "not possible", "passed"]
    assert written["rows"][0]["values"] == measures(Machine("cpu", 0, tmp_path))
    assert written["rows"][1]["reason"] == "is wrong"
    assert "ValueError: the third" in written["rows"][1]["details"]
    assert written["rows"][2]["reason"] == "its process ended with status 3"
    assert written["rows"][4]["values"] == {"rows": 4}
    table = (tmp_path / "gpu-report.md").read_text()
    assert "quick 1 (met: at most 2); slow 5 (missed: at most 2); of each 1, 2.5; how a / b" in table
    assert len([line for line in table.splitlines() if line.startswith("| ")]) == 7
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_a_row_that_hangs_ends_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    machine, began = Machine("cpu", 0, tmp_path), time.monotonic()
    seconds = 1.0
    while True:  # a busy machine may need longer until it has started its child
        outcome = attempt(row(hangs, seconds), machine, tmp_path / "log")
        assert outcome.result == "failed"
        assert "it was not done within" in outcome.reason
        if (tmp_path / "child").exists():
            break
        seconds *= 2
    assert time.monotonic() - began < 900
    until(lambda: not runs(int((tmp_path / "child").read_text())))


def test_no_row_begins_when_the_time_is_over(tmp_path: Path) -> None:
    report = Report(tmp_path, {})
    run([row(measures), row(fails)], Machine("cpu", 0, tmp_path), report, 0.0)
    assert [outcome.result for outcome in report.outcomes] == ["not reached"] * 2
    assert "0 s were over" in (tmp_path / "gpu-report.md").read_text()
