"""`sdpipe run` as it is typed: with a scheduler, workers that speak its protocol, and what is refused before."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_sdpipe.cli import main
from tests.patience import until

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "-m", "lightning_sdpipe.cli", "run"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pipelines", "0", __file__], "--pipelines=0"),
        (["--pipelines", "2", "--stages", "0", __file__], "--stages=0"),
        (["--pipelines", "2", "--restarts", "-1", __file__], "--restarts=-1"),
        (
            ["--pipelines", "2", "--min-pipelines", "3", __file__],
            "--pipelines=2 is not allowed; give an integer from 3 (pipelines, at least --min-pipelines)",
        ),
        (["--pipelines", "2", "no_such_script.py"], "there is no script no_such_script.py"),
        (["--pipelines", "2", "--set", "window=1", __file__], "--set gives values of --policy, which is missing"),
        (["--pipelines", "2", "--policy", "no_such", __file__], "there is no policy 'no_such'"),
        (["--pipelines", "2", "--logs", str(ROOT), __file__], "cannot be made (File exists)"),
    ],
)
def test_what_is_refused_before_anything_starts(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_pipeline_does_not_start_pipelines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SDPIPE_PIPELINE", "0")
    assert main(["run", "--pipelines", "2", __file__]) == 2
    assert "already a pipeline" in capsys.readouterr().err


class Command:
    """A run of `sdpipe run` in the background."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.said, self.logs = directory / "said", directory / "logs"
        with self.said.open("wb") as err:
            self.process = subprocess.Popen(
                [*RUN, "--logs", str(self.logs), *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=err
            )

    def until(self, what: Callable[[], Any]) -> Any:
        return until(what, self.said.read_text)

    def says(self, pattern: str) -> re.Match[str]:
        match = self.until(lambda: re.search(pattern, self.said.read_text()))
        assert isinstance(match, re.Match)
        return match

    def pids(self, **variables: str) -> list[int]:
        """Of the children with these variables, by which ranks can be told from the scheduler; but for the keeper."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        wanted = {f"{name}={value}".encode() for name, value in variables.items()}
        found = [int(pid) for pid in children if wanted <= {*Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}]
        return [pid for pid in found if b"stay_with_child.py" not in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.distributed
def test_a_run_through_deaths(tmp_path: Path) -> None:
    """A pipeline dies, then the leader, then the scheduler, which has keys since others could reach it."""
    bind = "tcp://0.0.0.0:*"
    with Command(tmp_path, "--pipelines", "3", "--bind", bind, "-m", "tests.scripts.toy_trainer", "300") as run:
        run.says(r"1 stage × 3 pipelines; scheduler at tcp://0.0.0.0:\d+; logs in ")
        run.says("all 3 pipelines train")
        policy = json.loads((run.logs / "policy.json").read_text())["policy"]
        assert (policy["type"], policy["connectivity"]) == ("semi_decentralized", 7), "that of the script"
        assert (run.logs / "worker.key").exists()
        for pipeline in ("1", "0"):
            (victim,) = run.pids(SDPIPE_PIPELINE=pipeline)
            os.kill(victim, signal.SIGKILL)
            run.says(rf"pipeline {pipeline} lost \(stage 0 killed\); 2 of 3 go on")
            back = run.says(rf"pipeline {pipeline} is back after (\d+\.\d) s, at update (\d+)")
            assert float(back[1]) < 15
            assert int(back[2]) > 0
        ranks = {*run.pids(WORLD_SIZE="1")}
        (scheduler,) = {*run.pids()} - ranks
        os.kill(scheduler, signal.SIGKILL)
        run.says(r"the scheduler ended \(killed\); it starts again")
        assert run.process.wait() == 0
        assert "run ends" not in run.said.read_text()


@pytest.mark.distributed
def test_a_script_that_does_not_train(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('nothing to do')\n")
    with Command(tmp_path, "--pipelines", "2", str(script)) as run:
        assert run.process.wait() == 1
        run.says("the run ends: the script of pipeline [01] ended without training: it has not called Trainer.fit")
