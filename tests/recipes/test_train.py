"""The training app: sweeps, torchrun and Optuna, on four real processes with a few batches each."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.test_failures import processes_of
from tests.test_sweep import run_app

SMALL = (
    *("experiment=digits", "trainer.max_epochs=1", "+trainer.limit_train_batches=2", "+trainer.limit_val_batches=1"),
    *("+trainer.enable_progress_bar=false", "+trainer.enable_checkpointing=false", "+trainer.num_sanity_val_steps=0"),
)
FORKED = (*SMALL, "strategy.start_method=fork")


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "summary.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.distributed
def test_a_sweep_of_eight_jobs_of_four_processes(tmp_path: Path) -> None:
    choices = ["sync=semi_decentralized,all_reduce", "num_stages=1,2", "seed=1,2", f"hydra.sweep.dir={tmp_path}"]
    code, printed, marker = run_app(tmp_path, "recipes/train.py", "-m", *FORKED, *choices)
    assert code == 0, printed
    assert processes_of(marker) == []
    found = rows(tmp_path)
    assert [row["job"] for row in found] == list("01234567")
    assert {row["status"] for row in found} == {"done"}
    assert {row["workers"] for row in found} == {"4"}
    assert len({(row["sync"], row["num_stages"], row["seed"]) for row in found}) == 8
    for row in found:  # all pipelines in one group, or one worker alone: the rule was the row's own
        if row["sync"] == "all_reduce":
            assert float(row["mean_group_size"]) == 4 / int(row["num_stages"])
    last = printed.rstrip().splitlines()[-11:]
    assert last[0].split()[:6] == ["job", "sync", "num_stages", "seed", "status", "seconds"]
    assert [line.split()[0] for line in last[1:9]] == list("01234567")
    assert last[-1] == f"{tmp_path}/summary.csv"


@pytest.mark.distributed
@pytest.mark.parametrize(("on_failure", "jobs"), [("continue", ["failed", "done"]), ("stop", ["failed"])])
def test_a_failed_job_is_a_row_and_the_sweep_goes_on_or_stops(tmp_path: Path, on_failure: str, jobs: list[str]) -> None:
    choices = ["data.batch_size=2000,32", f"on_failure={on_failure}", f"hydra.sweep.dir={tmp_path}"]
    code, printed, marker = run_app(tmp_path, "-m", "recipes.train", "-m", *FORKED, "trainer.devices=2", *choices)
    assert code == 1, printed
    assert processes_of(marker) == []
    assert [row["status"] for row in rows(tmp_path)] == jobs
    assert rows(tmp_path)[0]["error"]
    assert "Job 0 failed" in printed
    assert printed.rstrip().endswith("summary.csv")
