"""``sdpipe demo`` on a hundred digits, in a copy of this process."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import TensorDataset

from lightning_sdpipe import cli, demo
from tests.own_session import script


def with_few_digits(directory: Path) -> None:
    os.chdir(directory)
    sys.modules["recipes"] = None  # type: ignore[assignment]  # importing them would fail, as next to a wheel
    digits = demo._digits()
    demo._digits = lambda: tuple(TensorDataset(*data[:96]) for data in digits)  # type: ignore[assignment,return-value]
    sys.exit(cli.main(["demo", "--epochs", "1"]))


def check(printed: str, directory: Path) -> None:
    """That it showed four runs and their last lines, and drew and reported them."""
    assert printed.count(f"{'━' * 24} 1/1 epochs\n") == 4
    assert {path.name for path in directory.iterdir()} >= {"sdpipe-demo.html", "sdpipe-demo.png"}
    *_, ours, theirs = printed.splitlines()
    for line, method in ((ours, "SDPipe"), (theirs, "all-reduce")):
        short = r"too short to tell \(\d+ of 96 updates\)|\d of 4 workers have told of no update"  # of one or none
        assert re.fullmatch(rf"   {method} +sdpipe: .*; ({short}).*", line), line


@pytest.mark.distributed
def test_two_methods_in_two_situations(tmp_path: Path) -> None:
    with script(tmp_path, with_few_digits, tmp_path) as run:
        assert run.wait() == 0, run.printed()
        assert run.left() == []
    check(run.printed(), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--epochs", "0"], "--epochs 0 must be at least 1."), ([], "sklearn not found; pip install")],
)
def test_what_is_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def finds(name: str, *_: Any) -> Any:
        return None if name == "sklearn" else name

    monkeypatch.setattr(demo, "find_spec", finds)
    assert cli.main(["demo", *arguments]) == 2
    assert said in capsys.readouterr().err
