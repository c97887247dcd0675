"""The examples run as their first lines say, and the pages about LightningCLI, Hydra and LoRA tell of them."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sdpipe import SDPipeStrategy
from recipes.harness.processes import be_rank
from tests.own_session import script
from tests.workers import free_port, run_workers

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "recipes/examples"
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft, of the extra examples")
needs_jsonargparse = pytest.mark.skipif(find_spec("jsonargparse") is None, reason="needs jsonargparse: extra examples")
needs_jupyter = pytest.mark.skipif(
    find_spec("nbclient") is None or find_spec("ipykernel") is None, reason="needs nbclient and ipykernel: extra dev"
)


def run(directory: Path, *commands: list[str]) -> str:
    """What these examples print, each with its arguments, one after the other."""
    with script(directory, _run, directory, *commands) as running:
        return running.ends(0)


@pytest.mark.distributed
def test_two_stages_and_two_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "4")
    printed = run(tmp_path, ["minimal.py"], ["huggingface.py"])
    assert printed.count("SDPipe: pipelines × stages = 2 × 2") == 1
    assert printed.count("SDPipe: pipelines × stages = 1 × 2") == 1


@pytest.mark.distributed
def test_two_optimizers_by_hand_learn_on_two_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few batches an epoch."""
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "4")
    printed = run(tmp_path, ["gan.py"], ["actor_critic.py"])
    assert printed.count("SDPipe: pipelines × stages = 2 × 1") == 2
    before, after = re.findall(r"was ([\d.]+) from that of the digits, and is ([\d.]+)", printed)[0]
    assert float(after) < 0.8 * float(before)
    first, last = re.findall(r"guessed (\d+)% of the digits right before, and (\d+)% after", printed)[0]
    assert int(first) < 30 < int(last)


@pytest.mark.distributed
@needs_jsonargparse
def test_lightning_cli(tmp_path: Path) -> None:
    """By the file that docs/launching.md shows, and by names and options on the command line."""
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/launching.md").read_text(), re.DOTALL)
    (tmp_path / "cli.yaml").write_text(shown)
    short = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.logger=false"]
    by_name = [
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.strategy=sdpipe",
        "--trainer.default_root_dir=by_name",
    ]
    printed = run(tmp_path, ["cli.py", "fit", "--config", "cli.yaml", *short], ["cli.py", "fit", *by_name, *short])
    assert "SDPipe: pipelines × stages = 2 × 2" in printed
    assert "method: DiLoCo(every=4" in printed
    assert "SDPipe: pipelines × stages = 2 × 1" in printed


@pytest.mark.distributed
@needs_peft
def test_lora_neither_sends_nor_saves_the_frozen_base(tmp_path: Path) -> None:
    printed = run(tmp_path, ["lora.py"])
    saved = torch.load(tmp_path / "checkpoints/adapters.ckpt", weights_only=False)["state_dict"]
    assert saved
    assert all("lora_" in name for name in saved)
    trained = sum(tensor.nbytes for tensor in saved.values())
    updates, sent = map(int, re.findall(r"(\d+) updates, (\d+) bytes sent", printed)[0])
    assert updates == 16
    assert sent == updates // 2 * trained  # in a group of two each sends a half, and half of the mean


def test_the_hydra_application_is_the_one_of_the_page() -> None:
    """Which tests/test_wheel.py runs."""
    page = (ROOT / "docs/hydra.md").read_text()
    for name, language in (("config.yaml", "yaml"), ("train.py", "python")):
        (shown,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
        assert (EXAMPLES / "hydra_app" / name).read_text() == shown


@pytest.mark.distributed
def test_an_elastic_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_sdpipe.cli", "run", "--pipelines", "1", str(EXAMPLES / "elastic.py"), "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "checkpoints/last.ckpt").exists()


@pytest.mark.slow
@pytest.mark.distributed
@needs_jupyter
def test_the_notebook(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(EXAMPLES / "tutorial.ipynb", as_version=4)
    before = signal.getsignal(signal.SIGINT)  # the client leaves another handler behind
    try:
        NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    finally:
        signal.signal(signal.SIGINT, before)
    (last,) = notebook.cells[-1].outputs
    assert re.fullmatch(r"'loss \d+\.\d\d before, \d+\.\d\d after'", last.data["text/plain"])


@pytest.mark.distributed
def test_the_cells_of_the_notebook(tmp_path: Path) -> None:
    """One after the other, without Jupyter."""
    with script(tmp_path, _run_cells, tmp_path) as running:
        running.ends(0)
    assert re.search(r"^'loss \d+\.\d\d before, \d+\.\d\d after'$", running.printed(), re.MULTILINE)


def _run_cells(directory: Path) -> None:
    os.chdir(directory)
    cells = [
        cell for cell in json.loads((EXAMPLES / "tutorial.ipynb").read_text())["cells"] if cell["cell_type"] == "code"
    ]
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        *lines, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(lines, []), "cell", "exec"), names)
        exec(compile(ast.Interactive([last]), "cell", "single"), names)  # which shows what Jupyter would


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "count", "updates"),
    [
        ("minimal.py", 4, 16),
        pytest.param("huggingface.py", 2, 28, marks=pytest.mark.slow),
    ],
)
def test_each_process_may_run_the_whole_script(name: str, count: int, updates: int, tmp_path: Path) -> None:
    """As by torchrun, and by the default start_method: with random numbers of its own, unlike the copies above."""
    code = (EXAMPLES / name).read_text()
    assert run_workers(count, _run_whole, count, free_port(), tmp_path, code) == [updates] * count


def _run_whole(rank: int, count: int, port: int, directory: Path, code: str) -> int:
    """The updates that this rank has made."""
    be_rank(rank, count, port)
    os.chdir(directory)
    torch.seed()
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "script", "exec"), names)
    return int(names["trainer"].global_step)


def _run(directory: Path, *commands: list[str]) -> None:
    """One after the other in this process; workers are forked, which saves importing torch in each."""
    os.chdir(directory)
    defaults: Any = SDPipeStrategy.__init__.__kwdefaults__
    defaults["start_method"] = "fork"
    for name, *arguments in commands:
        sys.argv = [name, *arguments]
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
