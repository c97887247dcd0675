"""Who ends whom when a started process has ended."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_sdpipe.worker.launching.launcher import _Observer


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
