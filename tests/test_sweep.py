"""Sweeps of Hydra applications: each job gets its own processes, whatever became of the job before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_sdpipe import ConfigurationError
from lightning_sdpipe.sweep import Row, SweepTable, table
from tests.test_failures import processes_of

ROOT = Path(__file__).parents[1]


def test_the_table_shows_what_differs_and_what_was_asked_for() -> None:
    rows = [
        Row(0, {"sync": "a", "seed": "1"}, "done", 1.25, {"speed": 1234.5678, "metrics.loss": 0.5, "memory": 7}),
        Row(1, {"sync": "b", "seed": "1"}, "failed", 2.0, error="ValueError: no\nmore"),
    ]
    assert table(rows, ["speed", "metrics.*"]).splitlines() == [
        "job  sync  status  seconds  speed  loss",
        "0    a     done    1.25     1235   0.5",
        "1    b     failed  2                     ValueError: no",
    ]


def test_an_unknown_reaction_to_failures_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="on_failure='halt' is not known"):
        SweepTable("halt")  # type: ignore[arg-type]


def run_app(directory: Path, *arguments: str, timeout: float = 110) -> tuple[int, str, str]:
    """Exit status, what was printed, and a mark by which the processes of the run are known."""
    marker = f"sdpipe-test-{os.getpid()}-{time.monotonic_ns()}"
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"SDPIPE_TEST_RUN": marker, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return finished.returncode, finished.stdout, marker


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_jobs_of_a_users_own_application_are_right_after_a_rank_failed(tmp_path: Path) -> None:
    sweep = [f"hydra.sweep.dir={tmp_path}", "hydra.job.chdir=true", "case=none,raises,killed,three"]
    code, printed, marker = run_app(tmp_path, "-m", "tests.scripts.hydra_app", "-m", *sweep, timeout=220)
    assert code == 1, printed  # Hydra raises the first failed job's error at the end
    assert processes_of(marker) == []
    seen = {
        job: [json.loads(file.read_text()) for file in sorted((tmp_path / job).glob("rank*.json"))] for job in "0123"
    }
    assert [len(seen[job]) for job in "0123"] == [2, 0, 0, 3], printed
    for job, case in (("0", "none"), ("3", "three")):
        for rank in seen[job]:
            assert rank["world_size"] == len(seen[job])
            assert rank["case"] == case
            assert rank["job"] == [int(job), int(job), "hydra_app"]
            assert rank["directory"] == str(tmp_path / job)
        assert len({rank["when"] for rank in seen[job][1:]}) == 1
    assert "the user's own mistake" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3", "multirun.yaml"]
    assert not list(tmp_path.glob("*/.job-*"))
