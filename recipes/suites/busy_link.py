"""Pipelines under stragglers whose links are as busy as their processors: what hiding the averaging, and sending less,
is worth.

Workers are emulated: they sleep instead of computing, and every message between workers takes as long as over a link on
which moving a stage's parameters in full, in a group of all, lasts for a given share of an iteration. One card per
worker sends one message at a time, activations included.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
import torch

from lightning_sdpipe import Exchange, NoSync, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.exchange import traffic
from lightning_sdpipe.exchange.payloads import Full
from lightning_sdpipe.heterogeneity import Delays
from lightning_sdpipe.placement.network import Device, Network
from recipes.suites import machine, trainings
from recipes.suites.emulated import EmulatedChain
from recipes.suites.emulated_links import emulated_links
from recipes.suites.ratios import Ratios, Row, ratio, rotated
from recipes.suites.worker_reports import Probe, read_reports, summary

GOAL = 0.93
NOSYNC = "nosync"
KEYS = {
    "best": ("sdpipe/nosync/b/busy_link", GOAL),
    "default": ("sdpipe/nosync/b/busy_link/default", None),
}
"""Of the exchanges that have a ratio; others have rows."""


def measure(
    *,
    num_stages: int,
    num_pipelines: int,
    num_micro_batches: int,
    micro_batch_seconds: float,
    num_parameters: int,
    share: float,
    iterations: int,
    warm_up: int,
    repeats: int,
    delays: Mapping[str, Any],
    exchanges: Mapping[str, Any],
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Samples per second with each exchange, over those of pipelines that never synchronise.

    Args:
        num_stages: M.
        num_pipelines: N.
        num_micro_batches: of a mini-batch.
        micro_batch_seconds: forward and backward of one stage.
        num_parameters: of a stage, float32.
        share: of an iteration without delays that moving them in full takes in a group of all.
        iterations: of each pipeline.
        warm_up: how many of them do not count.
        repeats: trainings of each, with a seed of their own.
        delays: specification of what slows workers down.
        exchanges: specifications by name; "best" and "default" have a ratio.
        seed: of the first repeat.
    """
    trainings.quiet()
    slots = num_micro_batches + num_stages - 1
    moved = traffic.group(Full(), num_parameters, num_pipelines)
    rate = moved / (share * slots * micro_batch_seconds)
    workers = num_stages * num_pipelines
    devices = tuple(Device("emulated", rank, 1.0) for rank in range(workers))
    network = Network(devices, [[0.0] * workers] * workers, [[rate] * workers] * workers)

    def samples_per_second(name: str, repeat: int) -> Row:
        torch.manual_seed(seed + repeat)
        times = micro_batch_seconds / 3, 2 * micro_batch_seconds / 3
        module = EmulatedChain(num_stages, *times, num_parameters=num_parameters)
        loader = trainings.random_features(iterations * num_pipelines, num_micro_batches)
        slowness: Delays = hydra.utils.instantiate({**delays, "seed": seed + repeat})
        exchange: Exchange = Exchange() if name == NOSYNC else hydra.utils.instantiate(exchanges[name])
        strategy = SDPipeStrategy(
            num_stages,
            NoSync() if name == NOSYNC else SemiDecentralized(),
            exchange,
            num_micro_batches=num_micro_batches,
            delays=slowness,
            timeout=trainings.TRANSFER_TIMEOUT,
            start_method="fork",
        )
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory, emulated_links(network):
            trainings.fit(module, loader, strategy, workers, iterations, Probe(Path(directory), warm_up))
            reports = read_reports(Path(directory))
        row = summary(reports, num_micro_batches, machine.cores())
        speed = f"{row['samples_per_s']:.2f} samples/s ({time.perf_counter() - start:.0f} s)"
        print(f"busy link, {name}, repeat {repeat}: {speed}", flush=True)
        return {
            "what": name,
            "exchange": str(exchange),
            "repeat": repeat,
            "link_bytes_per_s": rate,
            **row,
            "seed": seed + repeat,
        }

    names = [NOSYNC, *exchanges]
    rows = [samples_per_second(name, repeat) for repeat in range(repeats) for name in rotated(names, repeat)]
    speed = {(row["what"], row["repeat"]): row["samples_per_s"] for row in rows}
    over = {name: [speed[name, r] / speed[NOSYNC, r] for r in range(repeats)] for name in exchanges}
    shape = f"{num_stages}x{num_pipelines} emulated, b, a full average takes {share:g} of an iteration"
    found = {
        key: ratio(over[name], goal, f"samples/s, {shape}: SemiDecentralized with {name} exchange over NoSync")
        for name, (key, goal) in KEYS.items()
        if name in over
    }
    medians = [
        {"what": f"{name}, median", "of_nosync": statistics.median(values), "low": min(values), "high": max(values)}
        for name, values in over.items()
    ]
    return [*rows, *medians], found
