"""Training a small BERT on four pipelines whose models are averaged, with and without the variance correction, against
the joint batch.

All three are real runs of the strategy with four processes: pipelines of one stage that average their models after
every step, all together, and for the joint batch their gradients before it. They see the same masks, and start alike.
"""

from __future__ import annotations

import csv
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_sdpipe import AllReduce, SDPipeStrategy, SemiDecentralized
from recipes.language import LanguageModel
from recipes.suites.figures import require_matplotlib, variance_figure
from recipes.suites.ratios import Row
from recipes.suites.trainings import make_trainer, quiet
from recipes.text.data import PydocText

NUM_PIPELINES = 4
METHODS: dict[str, tuple[AllReduce | SemiDecentralized, bool]] = {
    "joint batch": (AllReduce(), False),
    "models averaged": (SemiDecentralized(window=math.inf), False),
    "averaged, corrected": (SemiDecentralized(window=math.inf), True),
}

Curve = dict[int, float]  # the validation loss after so many samples


def measure(
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
