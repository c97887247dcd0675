"""Wall time of whole epochs, with validation, as a user waits for them: batches dealt by speed against equal shards.

Workers sleep instead of computing; everything else about them is real.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.heterogeneity import Static
from recipes.suites.cases import seeded
from recipes.suites.emulated import Validated, passes
from recipes.suites.ratios import Ratios, Row, quotients, ratio, refuse_unknown, rotated
from recipes.suites.trainings import TRANSFER_TIMEOUT, fit, quiet, random_features

LOWER_IS_BETTER = frozenset[str]()

OURS, SHARDED, ALL_REDUCE = "sdpipe/dealt", "sdpipe/sharded", "all_reduce/sharded"
BY_SPEED = "all_reduce/by_speed"
GOALS: dict[str, tuple[str, str, float]] = {
    "all_reduce/1x4/static": (OURS, ALL_REDUCE, 1.6),
    "all_reduce/1x4/static4": (OURS, ALL_REDUCE, 2.4),
    "all_reduce/4x4/b": (OURS, ALL_REDUCE, 1.4),
    "all_reduce/4x4/trace": (OURS, ALL_REDUCE, 1.3),
    "sharded/1x4/none": (OURS, SHARDED, 0.98),
    "batch_by_speed/1x4/static": (BY_SPEED, ALL_REDUCE, 1.5),
}
"""By the key of the ratio: the method whose epochs divide, that whose epochs are divided, and the least quotient."""
BOUND_GOAL = 0.93
LAYERS = 4
"""Of a stage, so that gradients come one after the other."""


class Stopwatch(L.Callback):
    """Notes when rank 0 begins each epoch, and when training ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._times: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._times.append(time.perf_counter())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._times.append(time.perf_counter())
        if trainer.global_rank == 0:
            self._path.write_text(json.dumps(self._times))


def run(
    *,
    methods: Mapping[str, Any],
    heterogeneity: Mapping[str, Any],
    grid: Mapping[str, Mapping[str, Any]],
    only: Sequence[str],
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Run the parts of the grid that ``only`` names.

    Args:
        methods: specifications for Hydra, by name.
        heterogeneity: likewise.
        grid: by name, what :func:`plan` takes.
        only: names of parts.
        seed: of the first repeat; the following ones count up from it.

    Returns:
        One row per training; and the ratios with goals.

    Raises:
        ConfigurationError: a part that there is not.
    """
    refuse_unknown("a part of suite=epochs", only, grid)
    quiet()
    rows = [
        _measured(grid[panel], methods, heterogeneity, condition, what, repeat, seed + repeat)
        for panel in only
        for condition, what, repeat in plan(grid[panel])
    ]
    return rows, ratios(rows)


def plan(part: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """The trainings of one part of the grid, in the order in which they run: under which condition, with which method
    and data, as ``"sdpipe/dealt"``, and which repeat."""
    for repeat in range(part["repeats"]):
        for condition, trained in part["conditions"].items():
            for what in rotated(trained, repeat):
                yield condition, what, repeat


def _measured(
    part: Mapping[str, Any],
    methods: Mapping[str, Any],
    heterogeneity: Mapping[str, Any],
    condition: str,
    what: str,
    repeat: int,
    seed: int,
) -> Row:
    method, _, data = what.partition("/")
    stages, pipelines, parts = part["num_stages"], part["num_pipelines"], part["num_micro_batches"]
    slots = parts + stages - 1
    slowness = seeded(heterogeneity[condition], seed)
    strategy = SDPipeStrategy(
        num_stages=stages,
        sync=seeded(methods[method], seed),
        num_micro_batches=parts,
        data="sharded" if data == "by_speed" else data,  # type: ignore[arg-type]  # checked there
        batch_by_speed=data == "by_speed",
        delays=slowness,
        timeout=TRANSFER_TIMEOUT,
        start_method="fork",
    )
    seconds = part["batch_seconds"] / slots / LAYERS
    torch.manual_seed(seed)
    module = Validated(LAYERS * stages, *passes(seconds), part["num_parameters"] // LAYERS)
    loaders = [random_features(part[name] * pipelines, parts) for name in ("batches", "validation_batches")]
    shape = f"{stages}x{pipelines}"
    print(f"{shape} {condition} {what}, repeat {repeat}", end=": ", flush=True)
    lengths = epoch_lengths(module, loaders, strategy, stages * pipelines, part["epochs"])
    print(f"{statistics.mean(lengths):.2f} s per epoch", flush=True)
    samples = part["batches"] * pipelines * parts
    own = _own_rates(slowness, part) if isinstance(slowness, Static) and stages == 1 else None
    return {
        "what": what,
        "shape": shape,
        "micro_batches": parts,
        "heterogeneity": condition,
        "repeat": repeat,
        "epoch_s": statistics.mean(lengths),
        "samples_per_s": samples / statistics.mean(lengths),
        "sum_of_rates": own and own * parts,
        "emulated": True,
        "seed": seed,
    }


def epoch_lengths(
    module: L.LightningModule, loaders: Sequence[DataLoader[Any]], strategy: SDPipeStrategy, workers: int, epochs: int
) -> list[float]:
    """Seconds of each epoch but the first, in which everything is started and no speed is known yet."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "times.json"
        fit(module, loaders, strategy, workers, Stopwatch(path), max_epochs=epochs + 1, num_sanity_val_steps=0)
        times = json.loads(path.read_text())
    return [after - before for before, after in pairwise(times[1:])]


def _own_rates(slowness: Static, part: Mapping[str, Any]) -> float:
    """Batches per second of all devices, each on its own."""
    factors = (slowness.factors[rank % len(slowness.factors)] for rank in range(part["num_pipelines"]))
    return sum((1 / factor for factor in factors), 0.0) / float(part["batch_seconds"])


def ratios(rows: Sequence[Row]) -> Ratios:
    """Return those of :data:`GOALS` that were measured, and how near to the sum of the devices' own speeds ours is."""
    found: Ratios = {}
    for key, (ours, other, goal) in GOALS.items():
        _, shape, condition = key.split("/")
        own = [row for row in rows if row["shape"] == shape]
        above, below, same = (other, condition), (ours, condition), ("micro_batches", "repeat")
        if values := quotients(own, "epoch_s", above, below, same=same):
            found[key] = ratio(values, goal, f"s per epoch, {shape} emulated, {condition}: {other} over {ours}")
    bound = [
        row["samples_per_s"] / row["sum_of_rates"]
        for row in rows
        if (row["what"], row["shape"], row["heterogeneity"]) == (OURS, "1x4", "static")
    ]
    if bound:
        meaning = f"samples/s of whole epochs, 1x4 emulated, static: {OURS} over the sum of the devices' own"
        found["bound/1x4/static"] = ratio(bound, BOUND_GOAL, meaning)
    return found
