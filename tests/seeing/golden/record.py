"""Trains two pipelines of two stages twice, with one slow worker and without, and keeps the schedulers' logs.

``python -m tests.seeing.golden.record DIRECTORY``
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_sdpipe import AllReduce, RunMetrics, SDPipeStrategy
from lightning_sdpipe.heterogeneity import Static
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.topology.mesh import Mesh
from recipes.suites.emulated import FEATURES, EmulatedChain

SLOW = Worker(0, 1)
FACTOR = 1.6
UPDATES = 112
STAGES = PIPELINES = MICRO_BATCHES = 2


def train(directory: Path, slow: Worker | None) -> None:
    """Leaves ``scheduler.jsonl`` in ``directory``."""
    torch.set_num_threads(1)
    mesh = Mesh.build(STAGES * PIPELINES, STAGES)
    factors = [FACTOR if Worker(*mesh.locate(rank)) == slow else 1.0 for rank in range(STAGES * PIPELINES)]
    strategy = SDPipeStrategy(
        STAGES,
        AllReduce(),
        num_micro_batches=MICRO_BATCHES,
        delays=Static(factors),
        log_dir=directory,
        start_method="fork",
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=STAGES * PIPELINES,
        strategy=strategy,
        max_epochs=1,
        logger=CSVLogger(directory),
        callbacks=[RunMetrics(every=16)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = torch.rand(UPDATES * PIPELINES * MICRO_BATCHES, FEATURES)
    trainer.fit(EmulatedChain(STAGES, 0.005, 0.01), DataLoader(samples, MICRO_BATCHES))


def main(directory: Path) -> None:
    """``straggler.jsonl`` and ``equal.jsonl``."""
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    for name, slow in (("straggler", SLOW), ("equal", None)):
        train(directory, slow)
        (directory / "scheduler.jsonl").rename(directory / f"{name}.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
