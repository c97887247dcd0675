"""Who ends whom when a started process has ended."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import weakref
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_utilities.core import rank_zero

import __main__
from lightning_sdpipe import ConfigurationError, SDPipeStrategy
from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.worker.launching import job
from lightning_sdpipe.worker.launching.launcher import _SET_FOR_WORKERS, CheckingLauncher, _Observer


class Harmless(_Observer):
    ended = 0

    def _terminate_all(self) -> None:
        self.ended += 1


@pytest.mark.parametrize(
    ("told", "failed", "ended"), [(False, False, 1), (True, False, 0), (False, True, 0)], ids=["no", "told", "failed"]
)
def test_who_is_about_to_end_by_itself_is_not_killed(
    told: bool, failed: bool, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    child: Any = subprocess.Popen([sys.executable, "-c", "raise SystemExit(143)"])
    child.wait()
    observer = Harmless([child])
    monkeypatch.setattr(_Observer, "trainer", SimpleNamespace(received_sigterm=told))
    monkeypatch.setattr(_Observer, "failed", failed)
    assert observer._run() is bool(ended)
    assert observer.ended == ended


@pytest.mark.parametrize("start_method", ["popen", "spawn"])
def test_a_notebook_is_told_to_fork(start_method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ConfigurationError, match=r"notebook.*SDPipeStrategy\(start_method=\"fork\"\).*CUDA"):
        L.Trainer(accelerator="cpu", devices=2, strategy=SDPipeStrategy(2, start_method=start_method))


def test_a_script_without_a_guard_is_told_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that was started to read it, whose tracebacks would be of what the user has not written."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SDPipeStrategy(start_method="spawn"), logger=False)
    with pytest.raises(SystemExit, match='if __name__ == "__main__":'):
        trainer.fit(BoringModel())


@pytest.mark.parametrize("program", ["", "-", "-c"])
def test_a_program_without_a_file_is_told_to_fork(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(__main__, "__spec__", None)
    monkeypatch.delattr(__main__, "__file__", raising=False)
    launcher = CheckingLauncher(LightningEnvironment(), 2, 1, lambda *_: None, 1.0)
    with pytest.raises(ConfigurationError, match=r"no file that other processes could run.*start_method=\"fork\""):
        launcher._start_children()


def test_a_script_starts_its_processes_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those that run it again for a later Trainer would start others for an earlier one."""
    monkeypatch.setenv("SDPIPE_JOINED", "3")
    with pytest.raises(ConfigurationError, match="has come to one with start_method='fork'"):
        L.Trainer(accelerator="cpu", devices=2, strategy=SDPipeStrategy(start_method="fork"), logger=False)


def test_a_program_that_has_left_its_directory_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(__main__, "__spec__", None)
    monkeypatch.setattr(__main__, "__file__", str(script), raising=False)
    launcher = CheckingLauncher(LightningEnvironment(), 2, 1, lambda *_: None, 1.0)
    with pytest.raises(ConfigurationError, match=rf"started as 'train.py', .*\(os.chdir\).* Start it as '{script}'"):
        launcher._start_children()


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning"])
def test_what_cannot_run_the_strategy_says_what_can(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The other package takes over Lightning's messages when it is imported, and prints none of them.
    monkeypatch.setattr(rank_zero, "log", rank_zero.log)
    make: Any = import_module("pytorch_lightning").Trainer if package == "pytorch_lightning" else L.Fabric
    with pytest.raises((ConfigurationError, ValueError), match="import lightning as L"):
        make(accelerator="cpu", strategy=SDPipeStrategy())


def test_a_run_whose_processes_have_ended_with_an_earlier_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    job.end()
    for name in _SET_FOR_WORKERS:
        monkeypatch.delenv(name, raising=False)
    launcher = CheckingLauncher(LightningEnvironment(), 1, 1, lambda *_: None, 1.0)

    def fails(train_dataloaders: BaseException) -> None:
        raise train_dataloaders

    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    with pytest.raises(ValueError, match="diverged"):
        launcher.launch(fails, ValueError("diverged"))
    with pytest.raises(WorkerFailedError, match=r"earlier run .*\(ValueError: diverged\).*start_method=\"fork\""):
        launcher.launch(fails, lost)
    job.end()
    with pytest.raises(RuntimeError, match="closed by peer"):
        launcher.launch(fails, lost)
    job.end()


def test_a_job_does_not_keep_the_model_of_its_first_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    job.end()
    for name in _SET_FOR_WORKERS:
        monkeypatch.delenv(name, raising=False)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = BoringModel()
    L.Trainer(accelerator="cpu", devices=1, strategy=SDPipeStrategy(), max_steps=1, **quiet).fit(module)
    kept = weakref.ref(module)
    del module
    gc.collect()
    found = kept()
    job.end()
    assert found is None
