"""Trains two pipelines of two stages, and keeps the schedulers' logs: with one slow worker and without, and with what
else holds a run up.

``python -m tests.seeing.golden.record DIRECTORY [SCENE ...]``; those of four pipelines are compressed.
"""

from __future__ import annotations

import gzip
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_sdpipe import AllReduce, RunMetrics, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.heterogeneity import Delays, Heterogeneity, Static
from lightning_sdpipe.heterogeneity.emulate import EmulatedBlock
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.topology.mesh import Mesh
from recipes.suites.emulated import FEATURES, EmulatedChain
from tests.features.running import quiet_trainer

SLOW = Worker(0, 1)
FACTOR = 1.6
UPDATES = 112
STAGES = PIPELINES = 2
LARGE, LARGE_SLOW, LARGE_UPDATES = 4, Worker(2, 1), 136


class SlowSamples(Dataset[torch.Tensor]):
    """Each takes 5 ms to load."""

    def __init__(self, samples: torch.Tensor) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        return self._samples[index]


def factors(slow: Worker, size: int = STAGES) -> list[float]:
    mesh = Mesh.build(size * size, size)
    return [FACTOR if Worker(*mesh.locate(rank)) == slow else 1.0 for rank in range(size * size)]


@dataclass
class Scene:
    """What is unusual about a run."""

    sync: Any = field(default_factory=AllReduce)
    delays: Heterogeneity = field(default_factory=Delays)
    samples: Callable[[torch.Tensor], Any] = lambda samples: samples
    blocks: Sequence[float] = (0.005, 0.005)
    """Seconds of the forward of each stage; a backward takes twice as long. There are as many pipelines, and as many
    micro-batches."""
    updates: int = UPDATES


SCENES: dict[str, Scene] = {
    "straggler": Scene(delays=Static(factors(SLOW))),
    "equal": Scene(),
    "groups": Scene(sync=SemiDecentralized(), delays=Static(factors(SLOW))),
    "loading": Scene(samples=SlowSamples),
    "stalls": Scene(delays=Delays(0.1, 0.4, seed=3)),
    "cut": Scene(blocks=(0.004, 0.010)),
}
for method, sync in (("all_reduce", AllReduce()), ("sdpipe", SemiDecentralized())):
    for name, delays in (("equal", Delays()), ("straggler", Static(factors(LARGE_SLOW, LARGE)))):
        SCENES[f"{method}_{name}_4x4"] = Scene(sync, delays, blocks=(0.005,) * LARGE, updates=LARGE_UPDATES)


class Chain(EmulatedChain):
    """Of blocks that take different times."""

    def __init__(self, forwards: Sequence[float]) -> None:
        super().__init__(0, 0.0, 0.0)
        self.blocks = nn.Sequential(*[EmulatedBlock(forward, 2 * forward) for forward in forwards])


def train(directory: Path, scene: Scene) -> None:
    """Leaves ``scheduler.jsonl`` in ``directory``."""
    size = len(scene.blocks)
    strategy = SDPipeStrategy(
        size, scene.sync, num_micro_batches=size, delays=scene.delays, log_dir=directory, start_method="fork"
    )
    samples = scene.samples(torch.rand(scene.updates * size * size, FEATURES))
    trainer(directory, strategy, size * size).fit(Chain(scene.blocks), DataLoader(samples, size))


def trainer(directory: Path, strategy: SDPipeStrategy, devices: int) -> L.Trainer:
    """For one epoch."""
    torch.set_num_threads(1)
    watching = {"logger": CSVLogger(directory), "callbacks": [RunMetrics(every=16)]}
    return quiet_trainer(devices=devices, strategy=strategy, max_epochs=1, **watching)


def main(directory: Path, names: Sequence[str]) -> None:
    """A log for each scene."""
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    for name in names or SCENES:
        train(directory, SCENES[name])
        log = directory / "scheduler.jsonl"
        if len(SCENES[name].blocks) == LARGE:
            (directory / f"{name}.jsonl.gz").write_bytes(gzip.compress(log.read_bytes(), mtime=0))
            log.unlink()
        else:
            log.rename(directory / f"{name}.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
