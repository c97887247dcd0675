"""The model while it trains, without stopping a worker: each writes down its part, and what the parts amount to
is found out afterwards.

At any moment the model is what the run would leave if it ended there: the mean over the pipelines, each as of its last
snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from torch import Tensor

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.pipeline.stage_runner import logging_through

State = dict[str, Tensor]


class Snapshots(L.Callback):
    """Saves this worker's parameters and buffers every so many iterations, and at the beginning.

    Args:
        directory: where the files go.
        every: iterations.
    """

    def __init__(self, directory: Path, every: int) -> None:
        self._directory, self._every = directory, every
        self._iterations = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._iterations += 1
        if self._iterations % self._every == 0:
            self._save(trainer, pl_module)

    def _save(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, SDPipeStrategy)
        stage, pipeline = trainer.strategy.mesh.locate(trainer.global_rank)
        clock = time.perf_counter()
        own = {name: value.clone() for name, value in module.state_dict().items() if not value.is_meta}
        torch.save((clock, own), self._directory / f"{pipeline}_{self._iterations}_{stage}.pt")


@dataclass(frozen=True)
class Snapshot:
    """A pipeline after so many iterations; ``clock`` is when the last of its stages had written its part."""

    pipeline: int
    iterations: int
    clock: float
    files: Sequence[Path]


def read_snapshots(directory: Path) -> list[Snapshot]:
    """Return what :class:`Snapshots` wrote, by pipeline and iteration."""
    files: dict[tuple[int, int], list[Path]] = {}
    for file in sorted(directory.glob("*.pt")):
        pipeline, iterations, _ = map(int, file.stem.split("_"))
        files.setdefault((pipeline, iterations), []).append(file)
    return [Snapshot(*key, max(_load(file)[0] for file in parts), parts) for key, parts in sorted(files.items())]


def moments(snapshots: Sequence[Snapshot], count: int) -> list[tuple[float, list[Snapshot]]]:
    """Return ``count`` evenly spaced moments from the start, when every worker was there, to the end, when the last
    pipeline was done: seconds since the start, and the last snapshot of each pipeline."""
    pipelines = sorted({snapshot.pipeline for snapshot in snapshots})
    start = max(snapshot.clock for snapshot in snapshots if snapshot.iterations == 0)
    end = max(snapshot.clock for snapshot in snapshots)
    found = []
    for index in range(count):
        now = start + (end - start) * (index + 1) / count
        past = [[s for s in snapshots if s.pipeline == pipeline and s.clock <= now] for pipeline in pipelines]
        found.append((now - start, [max(own, key=lambda s: s.iterations) for own in past]))
    return found


def evaluate(
    rank: int, directory: Path, workload: Mapping[str, Any], metric: str, samples: int, count: int
) -> list[tuple[float, float, float]]:
    """Return the learning curve of a run: seconds, samples seen by all pipelines together, and the metric.

    Args:
        rank: not used; this runs in a process of its own, because a process that has computed must not be forked.
        directory: with the snapshots.
        workload: specifications of the module and the data, for Hydra.
        metric: a name that ``validation_step`` logs.
        samples: of a mini-batch of one pipeline.
        count: points of the curve.
    """
    module, data = hydra.utils.instantiate(workload["model"]), hydra.utils.instantiate(workload["data"])
    data.setup("fit")
    curve = list[tuple[float, float, float]]()
    for seconds, last in moments(read_snapshots(directory), count):
        states = [{name: value for file in own.files for name, value in _load(file)[1].items()} for own in last]
        module.load_state_dict(mean_state(states))
        value = validate(module, data.val_dataloader(), metric)
        curve.append((seconds, samples * sum(snapshot.iterations for snapshot in last), value))
    return curve


def mean_state(states: Sequence[State]) -> State:
    """Return the mean of what is a floating-point number, and the largest of the rest (counters)."""
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    return {name: each.mean(0) if each.is_floating_point() else each.amax(0) for name, each in stacked.items()}


def validate(module: L.LightningModule, batches: Iterable[Any], metric: str) -> float:
    """Return the mean of what ``validation_step`` logs as ``metric``, weighted by the samples of each batch; random
    numbers are the same in each call."""
    total, weight = 0.0, 0
    torch.manual_seed(0)
    module.eval()
    logged: dict[str, float] = {}
    with (
        torch.inference_mode(),
        logging_through(module, lambda name, value, *_, **__: logged.update({name: float(value)})),
    ):
        for index, batch in enumerate(batches):
            module.validation_step(batch, index)
            size = len(next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0])
            total, weight = total + size * logged[metric], weight + size
    return total / weight


def _load(file: Path) -> tuple[float, State]:
    clock, state = torch.load(file, weights_only=True)
    return clock, state
