"""Cost of a step besides its compute: processor time of whole steps under a Trainer, beside Lightning's own DDP.

The model is tiny and its compute *emulated*, so what uses the processor is Lightning, the strategy, and the messages.
Pipelines have one stage, and gradients are averaged, as DDP does it. The parameters and the batches are equal.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_sdpipe import AllReduce, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.errors import ConfigurationError
from recipes.suites import trainings
from recipes.suites.emulated import EmulatedChain, passes
from recipes.suites.ratios import Ratios, Row, ratio, rotated
from recipes.suites.references import lightning_ddp

GOALS = {1: 1.05, 4: 1.10}
"""By the number of pipelines; for others, the last."""
OURS, BASELINE = "all_reduce", "lightning_ddp"
STRATEGIES: Mapping[str, Callable[[], DDPStrategy]] = {
    BASELINE: lightning_ddp,
    OURS: lambda: SDPipeStrategy(1, sync=AllReduce(), start_method="fork"),
    "sdpipe": lambda: SDPipeStrategy(1, sync=SemiDecentralized(), data="sharded", start_method="fork"),
}

Timing = tuple[float, float]  # seconds of wall clock and of processor time, per step


class StepClock(L.Callback):
    """Writes what this worker used from the end of one step to that of the last.

    Args:
        directory: where the files go.
        warm_up: steps that do not count.
    """

    def __init__(self, directory: Path, warm_up: int) -> None:
        self._directory = directory
        self._warm_up = warm_up
        self._readings: list[Timing] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._readings.append((time.perf_counter(), time.process_time()))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        counted = self._readings[self._warm_up - 1 :]
        used = [(last - first) / (len(counted) - 1) for first, last in zip(counted[0], counted[-1], strict=True)]
        (self._directory / f"{trainer.global_rank}.json").write_text(json.dumps(used))


def measure(
    *, pipelines: Sequence[int], compute_seconds: float, steps: int, warm_up: int, repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Milliseconds of a step, and the ratio of the workers' processor times.

    Args:
        pipelines: numbers of pipelines of one stage.
        compute_seconds: of a mini-batch, forward and backward, emulated.
        steps: that count, of one training.
        warm_up: steps before them, at least 1.
        repeats: trainings of each strategy.
        seed: of the batches.

    Raises:
        ConfigurationError: nothing to warm up with, or nothing to count.
    """
    if min(steps, warm_up) < 1:
        raise ConfigurationError(f"suite.step_cost has {steps=} and {warm_up=}; both must be at least 1.")
    trainings.quiet()
    rows: list[Row] = []
    ratios: Ratios = {}
    for count in pipelines:
        quotients = []
        for repeat in range(repeats):
            used = {
                name: _train(STRATEGIES[name](), count, compute_seconds, steps, warm_up, seed + repeat)
                for name in rotated(list(STRATEGIES), repeat)
            }
            for name, (wall, processor) in used.items():
                row = {"what": f"{name}, emulated", "shape": f"1x{count}", "repeat": repeat}
                rows.append(row | {"ms_per_step": 1e3 * wall, "processor_ms_per_step": 1e3 * processor})
            quotients.append(used[OURS][1] / used[BASELINE][1])
        meaning = f"processor time of a step of {count} workers, emulated compute: {OURS} over Lightning's DDP"
        ratios[f"step_cost/1x{count}"] = ratio(quotients, GOALS.get(count, max(GOALS.values())), meaning)
    return rows, ratios


def _train(strategy: DDPStrategy, count: int, compute_seconds: float, steps: int, warm_up: int, seed: int) -> Timing:
    """The mean over the workers of their wall clock, and the sum of their processor times."""
    torch.manual_seed(seed)
    module = EmulatedChain(1, *passes(compute_seconds))
    iterations = warm_up + steps
    loader = trainings.random_features(iterations * count, 1)
    with tempfile.TemporaryDirectory() as directory:
        clock = StepClock(Path(directory), warm_up)
        trainings.fit(module, [loader], strategy, count, clock, limit_train_batches=iterations)
        used = [json.loads(file.read_text()) for file in Path(directory).iterdir()]
    assert len(used) == count
    return sum(wall for wall, _ in used) / count, sum(processor for _, processor in used)
