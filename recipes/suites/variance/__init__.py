"""Adam's variance correction: what it does to the training of averaged models, and what it costs.

Trained is a small BERT on four pipelines of one stage that average their models after every step, all together, with
and without the correction; and with the joint batch, for which they average their gradients before it. All three are
real runs of the strategy with four processes; they see the same masks, and start alike.
"""

from __future__ import annotations

import csv
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
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
from recipes.language import LanguageModel
from recipes.suites.figures import require_matplotlib, variance_figure
from recipes.suites.processes import run_processes
from recipes.suites.ratios import Ratios, Row, ratio, rotated
from recipes.suites.trainings import make_trainer, quiet
from recipes.text.data import PydocText

LOWER_IS_BETTER = frozenset({"overhead"})

NUM_PIPELINES = 4
METHODS: dict[str, tuple[AllReduce | SemiDecentralized, bool]] = {
    "joint batch": (AllReduce(), False),
    "models averaged": (SemiDecentralized(window=math.inf), False),
    "averaged, corrected": (SemiDecentralized(window=math.inf), True),
}

Curve = dict[int, float]  # the validation loss after so many samples
Timing = tuple[float, float]  # seconds of wall clock and of processor time, of one step


def run(*, training: Mapping[str, Any], overhead: Mapping[str, Any], seed: int) -> tuple[list[Row], Ratios]:
    """Rows and ratios of both; the mappings are arguments of :func:`measure_training` and :func:`measure_overhead`."""
    timings, ratios = measure_overhead(**overhead, seed=seed)  # first: it wants a process that has done nothing yet
    return [*timings, *measure_training(**training, seed=seed)], ratios


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
    """The validation loss at the end, and in the file after each epoch; one row for each run.

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
    if output is not None:
        require_matplotlib()
    quiet()
    torch.set_num_threads(1)  # workers are forked from this process, which must not have a pool of threads
    curves: dict[str, list[Curve]] = {name: [] for name in METHODS}
    for repeat in range(repeats):
        for name, (sync, corrected) in METHODS.items():
            L.seed_everything(seed + repeat, verbose=False)
            model = LanguageModel("bert", network, lr=lr, warmup_steps=warmup_steps)
            data = PydocText(batch_size, length, network["vocab_size"])
            strategy = SDPipeStrategy(1, sync=sync, data="sharded", variance_correction=corrected, start_method="fork")
            curves[name].append(_train(model, data, strategy, epochs))
    rows: list[Row] = [
        {"what": name, "seed": seed + repeat, "samples": max(curve), "val_loss": curve[max(curve)], "curve": curve}
        for name, of_method in curves.items()
        for repeat, curve in enumerate(of_method)
    ]
    if output is not None:
        variance_figure(rows, Path(output))
    return rows


def _train(model: LanguageModel, data: PydocText, strategy: SDPipeStrategy, epochs: int) -> Curve:
    with tempfile.TemporaryDirectory() as directory:
        logger = CSVLogger(directory, name="", version="metrics")
        trainer = make_trainer(strategy, NUM_PIPELINES, max_epochs=epochs, num_sanity_val_steps=0, logger=logger)
        trainer.fit(model, datamodule=data)
        with (Path(directory) / "metrics" / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["val_loss"]]
    each = data.batch_size * NUM_PIPELINES
    return {(int(row["step"]) + 1) * each: float(row["val_loss"]) for row in rows}


def measure_overhead(*, steps: int, repeats: int, seed: int) -> tuple[list[Row], Ratios]:
    """Milliseconds of a step of AdamW with and without the correction, on parameters shaped as ResNet-50's, and the
    ratio of processor times. Both optimizers live in one process of one thread, and take turns.

    Args:
        steps: of one timing.
        repeats: timings of each optimizer.
        seed: of parameters and gradients.
    """
    (timings,) = run_processes(1, _compare, steps, repeats, seed)
    rows: list[Row] = [
        {"what": name, "repeat": repeat, "ms_per_step": 1e3 * wall, "processor_ms_per_step": 1e3 * processor}
        for repeat, timing in enumerate(timings)
        for name, (wall, processor) in timing.items()
    ]
    meaning = "processor time of a step of corrected AdamW (foreach, 25.6M parameters) over that of bare AdamW"
    return rows, {
        "overhead/adamw": ratio([timing["corrected"][1] / timing["bare"][1] for timing in timings], 1.3, meaning)
    }


def _compare(rank: int, steps: int, repeats: int, seed: int) -> list[dict[str, Timing]]:
    torch.manual_seed(seed)
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in ResNet({}).parameters()]
    optimizers: dict[str, Optimizer] = {
        "bare": _adamw(shapes),
        "corrected": VarianceCorrection(_adamw(shapes), NUM_PIPELINES),
    }
    for optimizer in optimizers.values():
        _time(optimizer, 2)  # the first step makes the state, the second one the mean's
    return [
        {name: _time(optimizers[name], steps) for name in rotated(list(optimizers), repeat)}
        for repeat in range(repeats)
    ]


def _adamw(shapes: Sequence[torch.Size]) -> AdamW:
    parameters = [nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    return AdamW(parameters, lr=1e-5, foreach=True)


def _time(optimizer: Optimizer, steps: int) -> Timing:
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        optimizer.step()
    return (time.perf_counter() - wall) / steps, (time.process_time() - processor) / steps
