"""The benchmark app runs its suites and says what the format asks for; its numbers are not judged here."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import multiprocessing
import os
import runpy
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from recipes import bench
from recipes.harness.processes import run_processes
from recipes.suites.grid import ratio
from tests.own_session import script

ROOT = Path(__file__).parents[2]
SUITES = sorted(file.stem for file in (ROOT / "conf/suite").glob("*.yaml"))


def app(*arguments: str) -> None:
    sys.argv = ["bench.py", *arguments]
    runpy.run_module("recipes.bench", run_name="__main__", alter_sys=True)


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_takes_its_parameters_and_knows_which_way_its_goals_lie(name: str) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("bench", [f"suite={name}"])
    suite = importlib.import_module(f"recipes.suites.{name}")
    inspect.signature(suite.run).bind(**config.suite, seed=config.seed)
    assert all("/" not in family for family in suite.LOWER_IS_BETTER)


@pytest.mark.distributed
def test_the_app_prints_tables_and_writes_the_file(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.json"
    with script(tmp_path, app, "suite=pipeline", f"json={file}", "seed=3", "+debug=pipeline_debug") as running:
        assert running.wait() == 0, running.printed()
        printed = running.printed()
    report = json.loads(file.read_text())
    assert list(report) == ["suite", "command", "seed", "versions", "machine", "rows", "ratios"]
    assert (report["suite"], report["seed"]) == ("pipeline", 3)
    assert report["command"].startswith("python -m recipes.bench suite=pipeline")
    assert report["versions"]["torch"] == torch.__version__
    assert set(report["ratios"]) == {
        *("bare_torch/M2", "bare_torch_processor/M2", "pipedream/m2", "memory/M2", "rehearsal/steps"),
        *("exchange/group2", "step_cost/1x1", "lock_step/M2"),
    }
    for key, value in report["ratios"].items():
        assert list(value) == ["value", "low", "high", "goal", "meaning"]
        assert 0 < value["low"] <= value["value"] <= value["high"]
        assert key in printed
    assert {row["what"] for row in report["rows"]} == {
        *("ours", "bare torch", "1f1b", "pipedream", "one process", "fullest rank"),
        *("plan", "training step", "group mean", "all_reduce", "lightning_ddp", "sdpipe", "lock step"),
    }


def test_a_goal_is_met_from_its_own_side() -> None:
    value = ratio([3.0, 1.0, 2.0], 1.5, "a over b")
    assert bench.is_met("speed/4", value, {"memory"})
    assert not bench.is_met("memory/4", value, {"memory"})
    table = bench.ratio_table({"speed/4": value, "memory/4": value}, {"memory"}).splitlines()
    assert "≥ 1.5" in table[1]
    assert "≤ 1.5" in table[2]
    assert ["met" in line.split() for line in table[1:]] == [True, False]


def test_what_is_infinite_is_null_in_the_file() -> None:
    report = {"rows": [{"a": 1.5, "curve": [(1, math.nan)]}], "ratios": {"samples": {"high": math.inf, "goal": None}}}
    assert bench.finite(report) == {
        "rows": [{"a": 1.5, "curve": [[1, None]]}],
        "ratios": {"samples": {"high": None, "goal": None}},
    }


def test_rows_of_the_same_columns_share_an_aligned_table() -> None:
    tables = bench.row_tables([{"what": "a", "ms": 1.23456}, {"what": "long", "ms": 12345.6}, {"what": "b", "mib": 2}])
    assert tables == "what  ms\na     1.23\nlong  12346\n\nwhat  mib\nb     2"


def _raise(rank: int) -> None:
    if rank == 1:
        raise ValueError("this one")
    time.sleep(60)


def _die(rank: int) -> None:
    if rank == 0:
        os._exit(1)
    time.sleep(60)


def _sleep(rank: int) -> None:
    time.sleep(60)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("work", "timeout", "error", "message"),
    [
        (_raise, 50, RuntimeError, "rank 1 failed(.|\n)*this one"),
        (_die, 50, RuntimeError, "rank 0 died"),
        (_sleep, 3, TimeoutError, r"ranks \[0, 1\] of 2"),
    ],
)
def test_no_process_is_left_when_one_fails(work, timeout, error, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        run_processes(2, work, timeout=timeout, after_failure=0.1)
    assert not multiprocessing.active_children()
