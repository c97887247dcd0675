"""The configurations are installed with the package: the application of docs/hydra.md, next to an unpacked wheel."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from tests.conftest import LEAN
from tests.test_demo import check

ROOT = Path(__file__).parents[1]
RECIPES = {
    "data": "builds the recipes' data modules",
    "model": "builds the recipes' modules",
    "experiment": "chooses one of these models and its data",
    "debug": "shrinks the model of an experiment",
    "suite": "configures recipes.bench",
}
"""The groups that are not installed, and why; they do nothing without the recipes."""
BASELINES = {"het_pipe.yaml", "parameter_server.yaml"}
"""Options that are not installed, since recipes.baselines has what they make."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``pip install`` would put into site-packages."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = directory.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(directory / "site")
    return directory / "site"


def ran(site: Path, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in that directory, next to the wheel."""
    paths = {"PYTHONPATH": os.pathsep.join([str(site), LEAN]), "MYPYPATH": str(site)}
    command, own = [sys.executable, *arguments], os.environ | paths
    return subprocess.run(command, cwd=directory, env=own, capture_output=True, text=True)


def test_the_wheel_has_the_groups_that_need_no_recipe(site: Path) -> None:
    conf = site / "lightning_sdpipe/conf"
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert groups > RECIPES.keys()
    installed = groups - RECIPES.keys()
    assert {path.name for path in conf.iterdir()} == installed | {"__init__.py"}
    for group in installed:
        options = {path.name for path in (ROOT / "conf" / group).glob("*.yaml")} - BASELINES
        assert {path.name for path in (conf / group).iterdir()} == options
        assert "_target_: recipes." not in "".join(path.read_text() for path in (conf / group).iterdir())
    assert not (site / "recipes").exists()
    assert (site / "lightning_sdpipe/py.typed").exists()


def test_a_checkout_has_them_in_the_same_place() -> None:
    with initialize_config_module("lightning_sdpipe.conf", version_base="1.3"):
        assert compose("train").strategy.schedule == "1f1b"


def test_the_page_of_hydra_says_which_groups_are_installed() -> None:
    page = (ROOT / "docs/hydra.md").read_text()
    rows = re.findall(r"^\| (`.+?) \|.*\| (yes|no) \|$", page, re.MULTILINE)
    said = {group: installed == "yes" for names, installed in rows for group in re.findall(r"`(\w+)`", names)}
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert said == {group: group not in RECIPES for group in groups}


@pytest.mark.distributed
def test_the_documented_application_sweeps_with_the_installed_groups(site: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs/hydra.md").read_text()
    for name, language in (("config.yaml", "yaml"), ("train.py", "python")):
        (example,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
        (tmp_path / name).write_text(example)
    choices = ["-m", "num_stages=1,2", "schedule=gpipe", "strategy.start_method=fork", "hydra.sweep.dir=sweep"]
    done = ran(site, tmp_path, "-c", FROM_WHEEL, *choices)
    assert done.returncode == 0, done.stderr
    assert f"{site}/lightning_sdpipe/__init__.py" in done.stdout
    with (tmp_path / "sweep/summary.csv").open() as file:
        assert [(row["num_stages"], row["status"]) for row in csv.DictReader(file)] == [("1", "done"), ("2", "done")]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_demo_needs_nothing_but_the_wheel(site: Path, tmp_path: Path) -> None:
    done = ran(site, tmp_path, "-m", "lightning_sdpipe.cli", "demo", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sdpipe-demo.html", "sdpipe-demo.png"]
    check(done.stdout, tmp_path)


@pytest.mark.slow
def test_a_typed_script_is_checked_against_the_wheel(site: Path, tmp_path: Path) -> None:
    script = (ROOT / "tests/scripts/typed.py").read_text()
    (tmp_path / "right.py").write_text(script)
    (tmp_path / "wrong.py").write_text(f'{script}\nSDPipeStrategy(schedule="1f2b")\n')
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-lightning_sdpipe.*]\nfollow_imports = silent\n")
    done = ran(site, tmp_path, "-m", "mypy", "--verbose", "--cache-dir", "cache", "right.py", "wrong.py")
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line.partition(":")[0] for line in found] == ["wrong.py"], done.stdout
    assert "'1f2b'" in found[0]
    assert f"{site}/lightning_sdpipe/__init__.py" in done.stderr  # not the checkout's


FROM_WHEEL = """
import runpy, sys
import lightning_sdpipe
print(lightning_sdpipe.__file__)
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""
