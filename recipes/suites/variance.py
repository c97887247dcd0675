"""Cost of Adam's variance correction: a step of AdamW with it, beside one without."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from lightning_sdpipe.optim import VarianceCorrection
from recipes.classification import ResNet
from recipes.harness.processes import run_processes
from recipes.suites.grid import Ratios, Row, compared, ratios, versus

LOWER_IS_BETTER = frozenset({"overhead"})

NUM_PIPELINES = 4


def run(*, steps: int, repeats: int, seed: int) -> tuple[list[Row], Ratios]:
    """Return milliseconds of a step of AdamW with and without the correction, on parameters shaped as ResNet-50's, and
    the ratio of processor times. Both optimizers live in one process of one thread, and take turns.

    Args:
        steps: of one timing.
        repeats: timings of each optimizer.
        seed: of parameters and gradients.
    """
    (rows,) = run_processes(1, _compare, steps, repeats, seed)
    meaning = "processor time of a step of corrected AdamW (foreach, 25.6M parameters) over that of bare AdamW"
    return rows, ratios(rows, {"overhead/adamw": versus(meaning, "processor_ms_per_step", "corrected", "bare", 1.3)})


def _compare(rank: int, steps: int, repeats: int, seed: int) -> list[Row]:
    torch.manual_seed(seed)
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in ResNet({}).parameters()]
    optimizers: dict[str, Optimizer] = {
        "bare": _adamw(shapes),
        "corrected": VarianceCorrection(_adamw(shapes), NUM_PIPELINES),
    }
    for optimizer in optimizers.values():
        _time(optimizer, 2)  # the first step makes the state, the second one the mean's
    return compared({name: partial(_time, optimizer, steps) for name, optimizer in optimizers.items()}, repeats)


def _adamw(shapes: Sequence[torch.Size]) -> AdamW:
    parameters = [nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    return AdamW(parameters, lr=1e-5, foreach=True)


def _time(optimizer: Optimizer, steps: int) -> Row:
    start = time.process_time()
    for _ in range(steps):
        optimizer.step()
    return {"processor_ms_per_step": 1e3 * (time.process_time() - start) / steps}
