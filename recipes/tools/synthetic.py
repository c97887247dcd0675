"""Synthetic tracks of shared GPUs: ``python -m recipes.tools.synthetic FILE``.

The paper's authors (SDPipe, §5.5) rented 16 containers with a share of a GPU each, and saw their speed change with the
neighbours' load. The recordings are not published as data, so this models the cause: the device serves all programs
that have work in turn, so the speed is 1 / their number. Neighbours start and finish work at random, and some devices
have more of them than others.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from lightning_sdpipe.heterogeneity.slowdowns import SHARED_GPUS
from lightning_sdpipe.heterogeneity.tracks import write_tracks

TRACKS = 16
SAMPLES = 300
INTERVAL_SECONDS = 1.0
SEED = 2023
NEIGHBOURS = (1, 4)
"""Smallest and largest number of other programs that share a device, drawn uniformly."""
MEAN_BUSY_SECONDS = (5.0, 40.0)
"""Mean length of one neighbour's work, drawn per neighbour."""
MEAN_IDLE_SECONDS = (20.0, 120.0)
"""Mean length of one neighbour's pauses, drawn per neighbour."""
JITTER = 0.05
"""Largest loss of speed at each sample from effects that are not modelled."""


def shared_gpu_track(rng: random.Random) -> list[float]:
    """Return the relative speeds of one device. Only ``rng.random`` is used, the same in all versions of Python."""
    count = NEIGHBOURS[0] + int(rng.random() * (NEIGHBOURS[1] - NEIGHBOURS[0] + 1))
    rates = [
        (INTERVAL_SECONDS / _between(rng, MEAN_IDLE_SECONDS), INTERVAL_SECONDS / _between(rng, MEAN_BUSY_SECONDS))
        for _ in range(count)
    ]  # chances per sample that a neighbour starts, and that it ends
    busy = [rng.random() < starts / (starts + ends) for starts, ends in rates]  # the share of time when it is busy
    speeds = []
    for _ in range(SAMPLES):
        busy = [rng.random() >= rates[i][1] if works else rng.random() < rates[i][0] for i, works in enumerate(busy)]
        speeds.append(round((1.0 - JITTER * rng.random()) / (1 + sum(busy)), 3))
    return speeds


def _between(rng: random.Random, bounds: tuple[float, float]) -> float:
    return bounds[0] + rng.random() * (bounds[1] - bounds[0])


def main(path: Path = SHARED_GPUS) -> None:
    source = f"synthetic shared GPUs: recipes.tools.synthetic with seed {SEED}"
    tracks = [shared_gpu_track(random.Random(SEED + index)) for index in range(TRACKS)]
    write_tracks(path, source, INTERVAL_SECONDS, tracks)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
