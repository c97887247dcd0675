"""An elastic run of three pipelines, one of which is killed. This is also the script of each pipeline."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_sdpipe import SDPipeStrategy
from recipes.gpu.models import TINY_BERT, Kind
from recipes.gpu.rows import Values
from recipes.gpu.running import Machine, Trial, adamw, loader, trainer_of

ROOT = Path(__file__).parents[2]
PIPELINES, STRUCK, BEFORE, AFTER = 3, 1, 10, 5
STEP_SECONDS = 0.05


def killed(machine: Machine) -> Values:
    """Kill a pipeline with ``kill -9``; return the longest step of the others, and when it was back."""
    command = [sys.executable, "-m", "lightning_sdpipe.cli", "run", "--pipelines", str(PIPELINES)]
    arguments = [machine.device, str(machine.count), str(machine.folder)]
    logs = machine.folder / "elastic"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    run = subprocess.Popen(
        [*command, "--logs", logs, "-m", "recipes.gpu.elastic", *arguments], env={**os.environ, "PYTHONPATH": path}
    )
    try:
        _wait(run, lambda: all(len(steps(machine.folder, each)) >= BEFORE for each in range(PIPELINES)))
        (victim,) = machine.folder.glob(f"elastic-{STRUCK}-*")
        at = time.monotonic()
        os.kill(int(victim.name.rpartition("-")[2]), signal.SIGKILL)
        _wait(run, lambda: len([each for each in steps(machine.folder, STRUCK) if each > at]) >= AFTER)
    finally:
        run.send_signal(signal.SIGINT)
        run.wait()
    longest, usual = 0.0, []
    for pipeline in set(range(PIPELINES)) - {STRUCK}:
        stamps = steps(machine.folder, pipeline)
        longest = max(longest, *(after - before for before, after in pairwise(stamps) if after > at))
        usual += [after - before for before, after in pairwise(stamps) if after <= at]
    back = min(each for each in steps(machine.folder, STRUCK) if each > at) - at
    return {"usual step, s": statistics.median(usual), "longest step of the others, s": longest, "back after, s": back}


def steps(folder: Path, pipeline: int) -> list[float]:
    """Return when this pipeline ended steps, in all its lives."""
    lines = [line for path in folder.glob(f"elastic-{pipeline}-*") for line in path.read_text().split("\n")[:-1]]
    return sorted(map(float, lines))


def _wait(run: subprocess.Popen[Any], until: Callable[[], bool]) -> None:
    while not until():
        if run.poll() is not None:
            raise RuntimeError(f"sdpipe run ended with status {run.returncode}; gpu-report.log has what it said")
        time.sleep(0.05)


class _Diary(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.path = folder / f"elastic-{os.environ['SDPIPE_PIPELINE']}-{os.getpid()}"

    def on_train_batch_end(self, *_: Any) -> None:
        with open(self.path, "a") as file:
            file.write(f"{time.monotonic()}\n")


def main() -> None:
    """Train a pipeline for longer than anyone waits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("count", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = Machine(options.device, options.count, options.folder)
    backend = "gloo" if machine.shares(PIPELINES) else None
    devices = machine.devices(max(1, machine.count))  # of which each pipeline takes one
    strategy = SDPipeStrategy(parallel_devices=devices, process_group_backend=backend)
    kind = Kind(True, TINY_BERT, 16, 8)
    trainer = trainer_of(machine, strategy, 1, max_epochs=1, callbacks=[_Diary(machine.folder)])
    trainer.fit(Trial(kind.net(), adamw, STEP_SECONDS), loader(kind.samples(100_000), kind.batch))


if __name__ == "__main__":
    main()
