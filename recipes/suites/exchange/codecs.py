"""Cost of writing and reading messages, in copies of the tensor: one thread, as each worker of a shared machine has.

A copy is timed like everything else, in turn with it, in processor time, so that other processes matter little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from lightning_sdpipe.exchange.payloads import EightBit, Full, Half, Modulo, OneBit, Payload
from recipes.harness.processes import run_processes
from recipes.suites.grid import Ratios, Row, ratio, rotated

PAYLOADS: dict[str, Payload] = {
    "full": Full(),
    "half": Half(),
    "eight_bit": EightBit(),
    "stochastic": EightBit(rounding="stochastic"),
    "one_bit": OneBit(),
}
GOALS = {"eight_bit encode": 7.0, "eight_bit decode": 5.0, "stochastic encode": 10.0, "one_bit encode": 10.0}

Timing = dict[str, float]  # seconds of processor time of a call, by what was called


def measure(*, elements: int, calls: int, repeats: int, seed: int) -> tuple[list[Row], Ratios]:
    """Medians of all codecs, and ratios of those with a goal.

    Args:
        elements: of the tensor, float32.
        calls: of one timing.
        repeats: timings of each.
        seed: of the tensor.
    """
    (timings,) = run_processes(1, _compare, elements, calls, repeats, seed)
    copies = {name: [timing[name] / timing["copy"] for timing in timings] for name in timings[0]}
    rows: list[Row] = [
        {"what": name, "copies": median(quotients), "processor_ms": 1e3 * median(timing[name] for timing in timings)}
        for name, quotients in copies.items()
    ]
    ratios = {
        f"codec/{name.replace(' ', '_')}": ratio(
            copies[name], goal, f"processor time of one {name} of {elements} float32, over that of a copy"
        )
        for name, goal in GOALS.items()
    }
    return rows, ratios


def _compare(rank: int, elements: int, calls: int, repeats: int, seed: int) -> list[Timing]:
    work = _work(torch.randn(elements, generator=torch.Generator().manual_seed(seed)))
    return [{name: _time(work[name], calls) for name in rotated(list(work), repeat)} for repeat in range(repeats)]


def _work(x: Tensor) -> dict[str, Callable[[], object]]:
    values, residual = torch.empty_like(x), torch.zeros_like(x)
    work: dict[str, Callable[[], object]] = {"copy": partial(values.copy_, x)}
    for name, payload in PAYLOADS.items():
        message = torch.empty(payload.nbytes(x.numel()), dtype=torch.uint8)
        payload.encode(x, message)  # so that it can be decoded, whatever comes first
        work[f"{name} encode"] = partial(payload.encode, x, message)
        work[f"{name} encode with feedback"] = partial(payload.encode, x, message, residual)
        work[f"{name} decode"] = partial(payload.decode, message, values)
        work[f"{name} decode and add"] = partial(payload.decode, message, values, 0.5)
    modulo = Modulo()
    message = torch.empty(modulo.nbytes(x.numel()), dtype=torch.uint8)
    theta = torch.full((-(-x.numel() // modulo.block),), 0.1)
    modulo.encode(x, theta, message)
    work["modulo encode"] = partial(modulo.encode, x, theta, message)
    work["modulo decode"] = partial(modulo.decode, message, x, values)
    return work


def _time(call: Callable[[], object], calls: int) -> float:
    call()  # what was called before has left other things in the cache
    start = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - start) / calls
