"""Cost of a step of a corrected optimizer, beside a step of the bare one: AdamW on parameters shaped as ResNet-50's.

One thread, as each worker of a pipeline has on a shared machine. Both optimizers live in one process and take turns,
on parameters and gradients of their own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from lightning_sdpipe.optim import VarianceCorrection
from recipes.classification import ResNet
from recipes.suites.processes import run_processes
from recipes.suites.ratios import Ratios, Row, ratio, rotated

NUM_WORKERS = 4
TIMEOUT_SECONDS = 300.0

Timing = tuple[float, float]  # seconds of wall clock and of processor time, of one step


def measure(*, steps: int, repeats: int, seed: int) -> tuple[list[Row], Ratios]:
    """Milliseconds of a step, and the ratio of processor times.

    Args:
        steps: of one timing.
        repeats: timings of each optimizer.
        seed: of parameters and gradients.
    """
    (timings,) = run_processes(1, _compare, steps, repeats, seed, timeout=TIMEOUT_SECONDS)
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
        "corrected": VarianceCorrection(_adamw(shapes), NUM_WORKERS),
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
