"""Cost of encoding and decoding messages, as a ratio to a copy of the tensor, with one thread, as each worker of a
shared machine has.

The copy is timed in turn with the codecs, in processor time, so that other processes matter little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from lightning_sdpipe.exchange.payloads import EightBit, OneBit, Payload
from recipes.harness.processes import run_processes
from recipes.suites.grid import Ratios, Row, compared, ratios, versus

PAYLOADS: dict[str, Payload] = {
    "eight_bit": EightBit(),
    "stochastic": EightBit(rounding="stochastic"),
    "one_bit": OneBit(),
}
GOALS = {"eight_bit encode": 7.0, "eight_bit decode": 5.0, "stochastic encode": 10.0, "one_bit encode": 10.0}


def measure(*, elements: int, calls: int, repeats: int, seed: int) -> tuple[list[Row], Ratios]:
    """Return timings of all codecs, and ratios of those with a goal.

    Args:
        elements: elements of the tensor, float32.
        calls: calls in one timing.
        repeats: timings of each.
        seed: seed of the tensor.
    """
    (rows,) = run_processes(1, _compare, elements, calls, repeats, seed)
    goals = {
        f"codec/{name.replace(' ', '_')}": versus(
            f"processor time of one {{one}} of {elements} float32, over that of a {{other}}",
            *("processor_ms", name, "copy", value),
        )
        for name, value in GOALS.items()
    }
    return rows, ratios(rows, goals)


def _compare(rank: int, elements: int, calls: int, repeats: int, seed: int) -> list[Row]:
    x = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
    values = torch.empty_like(x)
    work: dict[str, Callable[[], object]] = {"copy": partial(values.copy_, x)}
    for name, payload in PAYLOADS.items():
        message = torch.empty(payload.nbytes(x.numel()), dtype=torch.uint8)
        payload.encode(x, message)  # so that decoding may come first
        work[f"{name} encode"] = partial(payload.encode, x, message)
        work[f"{name} decode"] = partial(payload.decode, message, values)
    return compared({name: partial(_time, call, calls) for name, call in work.items()}, repeats)


def _time(call: Callable[[], object], calls: int) -> Row:
    call()  # warms up the cache after other calls
    start = time.process_time()
    for _ in range(calls):
        call()
    return {"processor_ms": 1e3 * (time.process_time() - start) / calls}
