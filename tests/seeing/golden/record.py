"""Trains two pipelines of two stages twice, with one slow worker and without, and keeps the schedulers' logs.

``python -m tests.seeing.golden.record DIRECTORY``, and with ``4x4`` behind it four of four by two methods, compressed.
"""

from __future__ import annotations

import gzip
import logging
import sys
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_sdpipe import AllReduce, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.heterogeneity import Static
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.topology.mesh import Mesh
from recipes.suites.emulated import FEATURES, EmulatedChain

SLOW = Worker(0, 1)
FACTOR = 1.6
UPDATES = 112
STAGES = PIPELINES = MICRO_BATCHES = 2
LARGE_SLOW = Worker(2, 1)
LARGE_UPDATES = 136


def train(
    directory: Path,
    slow: Worker | None,
    size: int = STAGES,
    updates: int = UPDATES,
    sync: AllReduce | SemiDecentralized | None = None,
) -> None:
    """Leaves ``scheduler.jsonl`` of ``size`` × ``size`` workers in ``directory``."""
    torch.set_num_threads(1)
    mesh = Mesh.build(size * size, size)
    factors = [FACTOR if Worker(*mesh.locate(rank)) == slow else 1.0 for rank in range(size * size)]
    strategy = SDPipeStrategy(
        size,
        sync or AllReduce(),
        num_micro_batches=size,
        delays=Static(factors),
        log_dir=directory,
        start_method="fork",
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=size * size,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = torch.rand(updates * size * size, FEATURES)
    trainer.fit(EmulatedChain(size, 0.005, 0.01), DataLoader(samples, size))


def main(directory: Path, large: bool) -> None:
    """``straggler.jsonl`` and ``equal.jsonl``, or those of four of four by each method."""
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    log = directory / "scheduler.jsonl"
    if not large:
        for name, slow in (("straggler", SLOW), ("equal", None)):
            train(directory, slow)
            log.rename(directory / f"{name}.jsonl")
        return
    for method, sync in (("all_reduce", AllReduce()), ("sdpipe", SemiDecentralized())):
        for name, slow in (("straggler", LARGE_SLOW), ("equal", None)):
            train(directory, slow, 4, LARGE_UPDATES, sync)
            (directory / f"{method}_{name}_4x4.jsonl.gz").write_bytes(gzip.compress(log.read_bytes(), mtime=0))
            log.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "4x4" in sys.argv[2:])
