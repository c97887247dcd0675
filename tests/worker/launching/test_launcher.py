"""Who ends whom when a started process has ended."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import pytorch_lightning
from lightning.fabric.plugins.environments import LightningEnvironment

import __main__
from lightning_sdpipe import ConfigurationError, SDPipeStrategy
from lightning_sdpipe.worker.launching.launcher import CheckingLauncher, _Observer


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


@pytest.mark.parametrize("program", ["", "-", "-c"])
def test_a_program_without_a_file_is_told_to_fork(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(__main__, "__spec__", None)
    launcher = CheckingLauncher(LightningEnvironment(), 2, 1, lambda *_: None, 1.0)
    with pytest.raises(ConfigurationError, match=r"no file that other processes could run.*start_method=\"fork\""):
        launcher._start_children()


@pytest.mark.parametrize("make", [pytorch_lightning.Trainer, L.Fabric])
def test_what_cannot_run_the_strategy_says_what_can(make: Any) -> None:
    for strategy in ("sdpipe", SDPipeStrategy()):
        with pytest.raises((ConfigurationError, ValueError), match="import lightning as L"):
            make(accelerator="cpu", strategy=strategy)
