"""Adam's variance correction: what it does to the training of averaged models, and what it costs.

Trained is a small BERT on four pipelines of one stage that average their models after every step, all together, with
and without the correction; and with the joint batch, for which they average their gradients before it. All three are
real runs of the strategy with four processes; they see the same masks, and start alike.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from csv import DictReader
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim import AdamW, Optimizer

from lightning_sdpipe import AllReduce, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.optim import VarianceCorrection
from recipes.classification import ResNet
from recipes.harness.processes import run_processes
from recipes.language import LanguageModel
from recipes.suites.figures import curve_points, plot, require_matplotlib
from recipes.suites.grid import Goal, Ratios, Row, ratios, rotated
from recipes.suites.trainings import make_trainer, quiet
from recipes.text.data import PydocText

LOWER_IS_BETTER = frozenset({"overhead"})

NUM_PIPELINES = 4
METHODS: dict[str, tuple[AllReduce | SemiDecentralized, bool]] = {
    "joint batch": (AllReduce(), False),
    "models averaged": (SemiDecentralized(window=math.inf), False),
    "averaged, corrected": (SemiDecentralized(window=math.inf), True),
}


def run(*, training: Mapping[str, Any], overhead: Mapping[str, Any], seed: int) -> tuple[list[Row], Ratios]:
    """Return rows and ratios of both; the mappings are arguments of :func:`measure_training` and
    :func:`measure_overhead`."""
    timings, found = measure_overhead(**overhead, seed=seed)  # first: it wants a process that has done nothing yet
    return [*timings, *measure_training(**training, seed=seed)], found


def measure_training(
    *,
    network: Mapping[str, Any],
    batch_size: int,
    length: int,
    lr: float,
    warmup_steps: int,
    epochs: int,
    repeats: int,
    output: str | None,
    seed: int,
) -> list[Row]:
    """Return the validation loss at the end, and in the file after each epoch; one row for each run.

    Args:
        network: settings of the BERT; its ``vocab_size`` is that of the vocabulary.
        batch_size: rows of one pipeline.
        length: tokens of a row.
        lr: the learning rate of every run.
        warmup_steps: over which it rises.
        epochs: over the text of Python's reference manual.
        repeats: seeds.
        output: a file; a PNG and an SVG of the curves get its name.
        seed: the first one.
    """
    require_matplotlib(output)
    quiet()
    torch.set_num_threads(1)  # workers are forked from this process, which must not have a pool of threads
    rows: list[Row] = []
    for repeat in range(repeats):
        for name, (sync, corrected) in METHODS.items():
            L.seed_everything(seed + repeat, verbose=False)
            model = LanguageModel("bert", network, lr=lr, warmup_steps=warmup_steps)
            data = PydocText(batch_size, length, network["vocab_size"])
            strategy = SDPipeStrategy(1, sync=sync, data="sharded", variance_correction=corrected, start_method="fork")
            with tempfile.TemporaryDirectory() as directory:
                options: dict[str, Any] = {
                    "logger": CSVLogger(directory, name="", version="metrics"),
                    "max_epochs": epochs,
                }
                make_trainer(strategy, NUM_PIPELINES, num_sanity_val_steps=0, **options).fit(model, datamodule=data)
                with Path(directory, "metrics", "metrics.csv").open() as file:
                    logged = [row for row in DictReader(file) if row["val_loss"]]
            each = batch_size * NUM_PIPELINES
            curve = [((int(row["step"]) + 1) * each, float(row["val_loss"])) for row in logged]
            row = {"what": name, "seed": seed + repeat, "samples": curve[-1][0], "val_loss": curve[-1][1]}
            rows.append(row | {"curve": curve})
    if output is not None:
        plot(curve_points(rows, samples=0, val_loss=1), Path(output), "variance", x="samples", y=["val_loss"])
    return rows


def measure_overhead(*, steps: int, repeats: int, seed: int) -> tuple[list[Row], Ratios]:
    """Return milliseconds of a step of AdamW with and without the correction, on parameters shaped as ResNet-50's, and
    the ratio of processor times. Both optimizers live in one process of one thread, and take turns.

    Args:
        steps: of one timing.
        repeats: timings of each optimizer.
        seed: of parameters and gradients.
    """
    (rows,) = run_processes(1, _compare, steps, repeats, seed)
    meaning = "processor time of a step of corrected AdamW (foreach, 25.6M parameters) over that of bare AdamW"
    goal = Goal(meaning, "processor_ms_per_step", {"what": "corrected"}, {"what": "bare"}, 1.3)
    return rows, ratios(rows, {"overhead/adamw": goal})


def _compare(rank: int, steps: int, repeats: int, seed: int) -> list[Row]:
    torch.manual_seed(seed)
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in ResNet({}).parameters()]
    optimizers: dict[str, Optimizer] = {
        "bare": _adamw(shapes),
        "corrected": VarianceCorrection(_adamw(shapes), NUM_PIPELINES),
    }
    for name in optimizers:
        _time(optimizers[name], 2)  # the first step makes the state, the second one the mean's
    return [
        {"what": name, "repeat": repeat} | _time(optimizers[name], steps)
        for repeat in range(repeats)
        for name in rotated(list(optimizers), repeat)
    ]


def _adamw(shapes: Sequence[torch.Size]) -> AdamW:
    parameters = [nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    return AdamW(parameters, lr=1e-5, foreach=True)


def _time(optimizer: Optimizer, steps: int) -> Row:
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        optimizer.step()
    ms = 1e3 / steps
    used = {"ms_per_step": ms * (time.perf_counter() - wall)}
    return used | {"processor_ms_per_step": ms * (time.process_time() - processor)}
