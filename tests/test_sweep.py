"""Sweeps of Hydra applications: each job gets its own processes, whatever became of the job before."""

from __future__ import annotations

import atexit
import csv
import json
from pathlib import Path

import pytest
from hydra import compose, initialize
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, open_dict, read_write

from lightning_sdpipe import ConfigurationError, sweep
from lightning_sdpipe.sweep import Row, SweepTable, table
from tests.own_session import module, script
from tests.worker.test_failures import mark, processes_of


def test_the_table_shows_what_differs_and_what_was_asked_for() -> None:
    rows = [
        Row(0, {"sync": "a", "seed": "1"}, "done", 1.23456, {"speed": 1234.5678, "metrics.loss": 0.5, "memory": 7}),
        Row(1, {"sync": "b", "seed": "1"}, "failed", 2.0, error="ValueError: no\nmore"),
    ]
    assert table(rows, ["speed", "metrics.*"]).splitlines() == [
        "job  sync  status  seconds  speed  loss",
        "0    a     done    1.235    1235   0.5",
        "1    b     failed  2                     ValueError: no",
    ]


def test_seconds_are_one_figure_in_the_file_and_in_the_terminal(tmp_path: Path) -> None:
    row = Row(0, {"seed": "1"}, "done", 1.23456, {"loss": 0.5, "seconds": 0.9})
    sweep._write(tmp_path / "summary.csv", [row])
    with (tmp_path / "summary.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"job": "0", "seed": "1", "status": "done", "seconds": "1.235", "loss": "0.5", "error": ""}
        ]
    assert table([row], ["*"]).splitlines() == ["job  status  seconds  loss", "0    done    1.235    0.5"]


def test_an_unknown_reaction_to_failures_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="on_failure='halt' is not known"):
        SweepTable("halt")  # type: ignore[arg-type]


def sweep_in(directory: Path) -> DictConfig:
    """The configuration of a sweep's first job."""
    with initialize(version_base="1.3", config_path=None):
        config = compose(None, ["+seed=1"], return_hydra_config=True)
    with read_write(config), open_dict(config):
        config.hydra.sweep.dir = config.hydra.runtime.output_dir = str(directory)
        config.hydra.job.num = 0
    return config


def test_a_failed_job_ends_a_sweep_that_shall_stop_after_its_row(tmp_path: Path) -> None:
    config, callback = sweep_in(tmp_path), SweepTable("stop")
    failed = JobReturn(status=JobStatus.FAILED)
    try:
        raise ValueError("no good")
    except ValueError as error:
        failed.return_value = error
    callback.on_multirun_start(config)
    atexit.unregister(callback._print)
    callback.on_job_start(config)
    with pytest.raises(SystemExit) as ended:
        callback.on_job_end(config, failed)
    assert ended.value.code == 1
    with (tmp_path / "summary.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["job"], row["status"], row["error"]) == ("0", "failed", "ValueError: no good")


@pytest.mark.distributed
def test_jobs_of_a_users_own_application_are_right_after_a_rank_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, jobs = mark(monkeypatch), tmp_path / "jobs"
    sweep = [f"hydra.sweep.dir={jobs}", "hydra.job.chdir=true", "case=killed,three"]
    with script(tmp_path, module, "tests.scripts.hydra_app", "-m", *sweep) as run:
        run.ends(1)  # Hydra raises the first failed job's error at the end
    printed = run.printed()
    assert processes_of(marker) == {}
    seen = {job: [json.loads(file.read_text()) for file in sorted((jobs / job).glob("rank*.json"))] for job in "01"}
    assert [len(seen[job]) for job in "01"] == [0, 3], printed
    for rank in seen["1"]:
        assert rank["world_size"] == 3
        assert rank["case"] == "three"
        assert rank["job"] == [1, 1, "hydra_app"]
        assert rank["directory"] == str(jobs / "1")
    assert len({rank["when"] for rank in seen["1"][1:]}) == 1
    assert sorted(path.name for path in jobs.iterdir()) == ["0", "1", "multirun.yaml"]
    assert not list(jobs.glob("*/.job-*"))
