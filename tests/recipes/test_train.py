"""The training app: sweeps, torchrun and Optuna, on real processes with a few batches each."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from recipes import command_line
from tests.own_session import module, script
from tests.patience import until

ROOT = Path(__file__).parents[2]
SMALL = (
    *("experiment=digits", "trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1"),
    *("+trainer.enable_progress_bar=false", "+trainer.enable_checkpointing=false", "+trainer.num_sanity_val_steps=0"),
)
FORKED = (*SMALL, "strategy.start_method=fork")


def by_path(*arguments: str) -> None:
    """``python recipes/train.py arguments...``"""
    sys.argv = ["recipes/train.py", *arguments]
    runpy.run_path(str(ROOT / "recipes/train.py"), run_name="__main__")


def torchrun(*arguments: str) -> None:
    """``torchrun -m recipes.train arguments...`` with two workers, which are copies of this process."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="tests", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, module)("recipes.train", *arguments)


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Here, what otherwise each script or each job of it would import."""
    for name in ("matplotlib.backends.backend_agg", "recipes.callbacks", "recipes.digits"):
        importlib.import_module(name)


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "summary.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.distributed
def test_a_failed_job_is_a_row_and_the_sweep_goes_on(tmp_path: Path) -> None:
    choices = ["data.batch_size=2000,32", "sync=all_reduce", "num_stages=1", f"hydra.sweep.dir={tmp_path}"]
    with script(tmp_path, by_path, "-m", *FORKED, "trainer.devices=2", *choices) as run:
        run.ends(1)
    failed, done = rows(tmp_path)
    assert [failed["status"], done["status"]] == ["failed", "done"]
    assert failed["error"]
    assert (done["job"], done["workers"], float(done["mean_group_size"])) == ("1", "2", 2)
    assert "Job 0 failed" in run.printed()
    last = run.printed().rstrip().splitlines()[-5:]
    assert last[0].split()[:4] == ["job", "data.batch_size", "status", "seconds"]
    assert [line.split()[0] for line in last[1:3]] == list("01")
    assert last[-1] == f"{tmp_path}/summary.csv"


@pytest.mark.distributed
def test_ranks_of_torchrun_share_one_directory_and_one_summary(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    where = f"hydra.run.dir={outputs}/${{start_time:%f}}"
    with script(tmp_path, torchrun, *SMALL, "trainer.devices=2", where) as run:
        run.ends(0)
    (output,) = outputs.iterdir()
    assert json.loads((output / "summary.json").read_text())["workers"] == 2
    expected = [".hydra", "metrics", "summary.json", "train.log", "training_curve.png"]
    assert sorted(path.name for path in output.iterdir()) == expected


def test_a_sweep_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=1,2"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="run it without torchrun"):
        command_line.prepare()


@pytest.mark.distributed
def test_an_interrupt_ends_the_sweep_and_all_its_processes(tmp_path: Path) -> None:
    sweep = [f"hydra.sweep.dir={tmp_path}", "seed=1,2", "trainer.devices=2"]
    endless = [option.replace("trainer.max_epochs=1", "trainer.max_epochs=1000") for option in FORKED]
    with script(tmp_path, module, "recipes.train", "-m", *endless, *sweep) as run:
        until(lambda: [*tmp_path.glob("0/metrics/metrics.csv")], run.printed)  # it trains
        os.kill(run.pid, signal.SIGINT)
        assert run.wait() != 0, run.printed()
        assert run.left() == []
    assert not (tmp_path / "1").exists()


@pytest.mark.distributed
def test_optuna_searches_for_the_least_objective(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1", "trainer.devices=2"]
    choices = [f"hydra.sweep.dir={tmp_path}", "model.lr=interval(0.01,0.1)", "num_stages=1"]
    with script(tmp_path, module, "recipes.train", "-m", *FORKED, *search, *choices) as run:
        run.ends(0)
    found = rows(tmp_path)
    assert {row["status"] for row in found} == {"done"}
    best = re.search(r"best_value: ([\d.]+)", (tmp_path / "optimization_results.yaml").read_text())
    assert best is not None
    assert float(best[1]) == min(float(row["metrics.val_loss"]) for row in found)
