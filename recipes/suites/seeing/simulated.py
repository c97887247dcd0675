"""Simulated own times of equal workers: how often one is named slow."""

from __future__ import annotations

import math
import random

from lightning_sdpipe.meter import FORWARD, PHASES
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.rows import Chunk, UpdateRow
from lightning_sdpipe.seeing.detectors import compute_straggler
from lightning_sdpipe.seeing.recording import Recording, series_of
from recipes.suites.grid import Ratios, Row, ratio


def measure(
    *, runs: int, workers: int, updates: int, seconds: float, common: float, own: float, keeps: float, seed: int
) -> tuple[list[Row], Ratios]:
    """Simulate runs of replicas at their own pace, with noise of the machine, which all share, and of each worker.

    Args:
        runs: number of runs.
        workers: workers in each run.
        updates: updates of each worker.
        seconds: seconds of an update.
        common: standard deviation of the machine's noise, in logarithms.
        own: standard deviation of a worker's noise, in logarithms.
        keeps: share of a worker's noise that remains in the next update; for the machine's it is 0.95.
        seed: seed of all randomness.
    """
    draw, accused = random.Random(seed), 0
    for _ in range(runs):
        machine = _lasting(draw, updates, 0.95, common)
        chunks = []
        for pipeline in range(workers):
            noise = _lasting(draw, updates, keeps, own)
            times = [round(1e6 * seconds * math.exp(a + b)) for a, b in zip(machine, noise, strict=True)]
            rows = tuple(UpdateRow(number, 1, _forward(us), 0) for number, us in enumerate(times))
            chunks.append(Chunk(Worker(0, pipeline), 1, sum(times) / 1e6, rows))
        series = series_of(chunks)
        accused += bool(compute_straggler(Recording(1, max(each.ends[-1] for each in series.values()), series, {})))
    row = {"what": "simulated", "runs": runs, "accused": accused}
    return [row], {"accused/simulated": ratio([accused / runs], 0.01, "drawn runs of equal workers: one was named")}


def _forward(us: int) -> tuple[int, ...]:
    return tuple(us if phase == FORWARD else 0 for phase in range(len(PHASES)))


def _lasting(draw: random.Random, updates: int, keeps: float, deviation: float) -> list[float]:
    """Return autocorrelated noise, of which the share ``keeps`` remains in the next value."""
    value, values = draw.gauss(0.0, deviation), []
    for _ in range(updates):
        value = keeps * value + draw.gauss(0.0, deviation * math.sqrt(1 - keeps**2))
        values.append(value)
    return values
