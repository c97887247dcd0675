"""What is said of versions that are newer than the tests have seen."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import lightning
import pytest
import torch

from lightning_sdpipe import cli, strategy, tested

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("torch", "2.9.1+cpu", "tested"),
        ("torch", "2.99.0a0", "newer than tested"),
        ("torch", "10.0", "newer than tested"),
        ("python", "3.11.7", "tested"),
        ("numpy", "99.0", ""),
        ("torch", "of my own", ""),
    ],
)
def test_verdicts(package: str, version: str, said: str) -> None:
    assert tested.verdict(package, version) == said


def test_the_import_warns_of_newer_versions_and_of_them_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"torch": torch.__version__, "lightning": lightning.__version__}
    monkeypatch.setattr(tested, "NEWEST", {"python": (3, 99), "torch": (99, 0), "lightning": (99, 0)})
    assert tested.warning(**versions) is None
    monkeypatch.setitem(tested.NEWEST, "torch", (1, 13))
    with pytest.warns(UserWarning, match=r"torch \S+ is newer than .*torch 1\.13, lightning 99\.0"):
        importlib.reload(strategy)
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith("newer than tested")] == [
        next(line for line in lines if line.startswith("torch"))
    ]


def test_what_was_tested_may_be_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package in ("torch", "lightning"):
        (allowed,) = [line for line in project["dependencies"] if line.startswith(f"{package}>=")]
        major, minor = map(int, allowed.rpartition("<")[2].split("."))
        assert tested.NEWEST[package] < (major, minor), f"{allowed} excludes the newest that was tested"
    *_, newest = (line for line in project["classifiers"] if line.startswith("Programming Language :: Python :: 3."))
    assert tested.NEWEST["python"] <= tuple(map(int, newest.rpartition(" ")[2].split(".")))
