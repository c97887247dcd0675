"""The trials themselves, on the CPU: the first GPU is not for finding their errors. tests/strategy/test_accelerators.py
has those of them that the fake accelerator can do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from recipes.gpu import __main__ as command
from recipes.gpu import checks, shares
from recipes.gpu.models import TINY_RESNET, Kind
from recipes.gpu.rows import Row, Values, attempt
from recipes.gpu.running import Machine

pytestmark = pytest.mark.distributed


def tried(work: Callable[[Machine], Values], machine: Machine) -> Values:
    """What the work finds in a process of its own."""
    log = machine.folder / "log"
    outcome = attempt(Row("", work, 1800.0), machine, log)
    assert outcome.result == "passed", f"{outcome.details}\n{log.read_text()[-3000:]}"
    return outcome.values


@pytest.mark.parametrize("work", [checks.resnet, checks.bert], ids=lambda work: work.__name__)
def test_models_are_timed(work: Callable[[Machine], Values], tmp_path: Path) -> None:
    values = tried(work, Machine("cpu", 0, tmp_path, dry=True))
    assert min(value for name, value in values.items() if name.endswith(", ms")) > 0


def test_an_epoch_is_compared_with_those_before_it(tmp_path: Path) -> None:
    machine, pattern = Machine("cpu", 0, tmp_path, dry=True), "1, 1, ½, ¼"
    alone = tried(partial(shares.epochs, "alone", pattern), machine)["batches/s of each"]
    ddp = tried(partial(shares.epochs, "DDP", pattern), machine)["s per epoch"]
    found = tried(partial(shares.epochs, "SDPipe", pattern), machine)
    assert found["DDP over it"] == pytest.approx(ddp / found["s per epoch"])
    assert found["of the bound"] == pytest.approx(8 / found["s per epoch"] / sum(alone))


def test_pauses_make_steps_so_long_that_a_device_holds_all_of_them(tmp_path: Path) -> None:
    machine, kind = Machine("cpu", 0, tmp_path, dry=True), Kind(False, TINY_RESNET, 32, 4)
    with shares.shares(machine, kind, (1.0, 1.0, 0.5, 0.25), length=0.1) as given:
        assert given.how == "pauses"
        steps = [pause + 0.1 for pause in given.pauses]
    assert steps == pytest.approx([0.5, 0.5, 1.0, 2.0])
    assert sum(0.1 / step for step in steps) < 1


@pytest.mark.parametrize("does", ["exec sleep 1000", "exit 1", "exit 0"], ids=["hangs", "fails", "starts"])
def test_mps_that_does_not_serve_is_tried_once(does: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    control, calls = tmp_path / "nvidia-cuda-mps-control", tmp_path / "calls"
    control.write_text(f'#!/bin/sh\necho "$1" >> {calls}\n{does}\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(shares, "_STARTS", 0.5)
    monkeypatch.setattr(shares, "_product_seconds", lambda rank, machine: time.sleep(1000))
    for _ in range(2):
        with shares.mps(Machine("cuda", 1, tmp_path)) as environment:
            assert environment is None
    assert calls.read_text().count("-d") == 1


def test_without_a_gpu_the_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert command.main([]) == 2
    assert "--dry" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_goes_through_all_rows(tmp_path: Path) -> None:
    called = [sys.executable, "-m", "recipes.gpu", "--dry", "--seconds", "3000", "--out", str(tmp_path)]
    done = subprocess.run(called, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rows = json.loads((tmp_path / "gpu-report.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [row.name for row in (*checks.ROWS, *shares.ROWS)]
    assert {row["name"] for row in rows if row["result"] != "passed"} == {"stages over NCCL"}
