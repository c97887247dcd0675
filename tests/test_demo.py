"""``sdpipe demo`` on a hundred digits, in a copy of this process."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import TensorDataset

from lightning_sdpipe import cli, command_line, demo
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
        short = r"too short to tell \(\d+ of 96 updates\)|\d of 4 workers have reported no update"  # of one or none
        assert re.fullmatch(rf"   {method} +sdpipe: .*; ({short}).*", line), line


@pytest.mark.distributed
def test_two_methods_in_two_situations(tmp_path: Path) -> None:
    with script(tmp_path, with_few_digits, tmp_path) as run:
        run.ends(0)
    check(run.printed(), tmp_path)


@pytest.mark.parametrize(
    ("seconds", "accuracies", "says"),
    [
        (
            (2.0, 4.0),
            (0.93, 0.94),
            "took 2.00 times as long with all-reduce as with SDPipe; SDPipe's accuracy is 1.0 points",
        ),
        (
            (4.0, 4.1),
            (0.95, 0.94),
            "took as long with all-reduce as with SDPipe; SDPipe's accuracy is 1.0 points higher.",
        ),
        (
            (4.0, 2.0),
            (0.94, 0.94),
            "SDPipe did not help here: its epochs took 2.00 times as long as those with all-reduce; ",
        ),
    ],
)
def test_the_verdict_follows_from_the_figures(
    seconds: tuple[float, float], accuracies: tuple[float, float], says: str
) -> None:
    rows = zip(demo.METHODS, seconds, accuracies, strict=True)
    assert says in demo.verdict({name: demo.Figures([time], right, "") for name, time, right in rows})


@pytest.mark.parametrize(
    ("share", "late", "factor"), [(0.99, 1e-4, 1.0), (0.75, 1e-4, 1.02), (0.9, 1e-3, 1.63), (0.1, 0.02, 50.7)]
)
def test_a_busy_machine_makes_emulated_devices_slower_or_gives_no_verdict(
    share: float, late: float, factor: float
) -> None:
    assert demo.longer(share, late) == pytest.approx(factor, rel=0.01)
    assert (demo.longer(share, late) > demo.LONGEST) == (share < 0.5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--epochs", "0"], "--epochs=0 is not allowed; give an integer from 1 (epochs)"),
        ([], "sklearn not found; pip install"),
    ],
)
def test_what_is_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def finds(name: str, *_: Any) -> Any:
        return None if name == "sklearn" else name

    monkeypatch.setattr(command_line, "find_spec", finds)
    assert cli.main(["demo", *arguments]) == 2
    assert said in capsys.readouterr().err
