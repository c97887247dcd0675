"""Pipelines under stragglers whose links are as busy as their processors: what hiding the averaging, and sending less,
is worth.

Workers are emulated: they sleep instead of computing, and every message between workers takes as long as over a link on
which moving a stage's parameters in full, in a group of all, lasts for a given share of an iteration. One card per
worker sends one message at a time. The stages of a pipeline are within a machine, or reach each other by the same
cards: then activations wait for averages that are being sent.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import torch

from lightning_sdpipe import Exchange, NoSync, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.heterogeneity import Delays
from lightning_sdpipe.placement.network import Device, Network
from lightning_sdpipe.topology.mesh import Mesh
from recipes.suites import machine, trainings
from recipes.suites.emulated import EmulatedChain, passes
from recipes.suites.emulated_links import WITHIN_A_MACHINE, emulated_links
from recipes.suites.ratios import Ratios, Row, ratio, rotated
from recipes.suites.worker_reports import Probe, read_reports, summary

GOAL = 0.93
NOSYNC = "nosync"
LINKS = {"between_machines": "", "everywhere": "/everywhere"}
"""Which links are busy, and what that adds to keys."""
KEYS: dict[str, tuple[str, float | None]] = {
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
    links: Sequence[str],
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
        links: which ones are busy: "between_machines", "everywhere".
        seed: of the first repeat.
    """
    trainings.quiet()
    slots = num_micro_batches + num_stages - 1
    part = -(-num_parameters // num_pipelines)
    moved = 4 * (num_parameters - part + (num_pipelines - 1) * part)  # the others' parts, and to each its own mean
    rate = moved / (share * slots * micro_batch_seconds)
    mesh = Mesh.build(num_stages * num_pipelines, num_stages)
    networks = {kind: _network(mesh, rate, kind) for kind in links}

    def samples_per_second(kind: str, name: str, repeat: int) -> Row:
        torch.manual_seed(seed + repeat)
        module = EmulatedChain(num_stages, *passes(micro_batch_seconds), num_parameters=num_parameters)
        loader = trainings.random_features(iterations * num_pipelines, num_micro_batches)
        slowness: Delays = hydra.utils.instantiate({**delays, "seed": seed + repeat})
        exchange: Exchange = Exchange() if name == NOSYNC else hydra.utils.instantiate(exchanges[name])
        strategy = SDPipeStrategy(
            num_stages,
            NoSync() if name == NOSYNC else SemiDecentralized(),
            exchange=exchange,
            num_micro_batches=num_micro_batches,
            data="sharded",  # equally many iterations, so that all meet the same delays
            delays=slowness,
            timeout=trainings.TRANSFER_TIMEOUT,
            start_method="fork",
        )
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory, emulated_links(networks[kind]):
            probe, workers = Probe(Path(directory), warm_up), num_stages * num_pipelines
            trainings.fit(module, [loader], strategy, workers, probe, limit_train_batches=iterations)
            reports = read_reports(Path(directory))
        row = summary(reports, num_micro_batches, machine.cores())
        speed = f"{row['samples_per_s']:.2f} samples/s ({time.perf_counter() - start:.0f} s)"
        print(f"busy link {kind}, {name}, repeat {repeat}: {speed}", flush=True)
        return {
            "what": name,
            "busy_links": kind,
            "exchange": str(exchange),
            "repeat": repeat,
            "link_bytes_per_s": rate,
            **row,
            "seed": seed + repeat,
        }

    names = [NOSYNC, *exchanges]
    rows = [
        samples_per_second(kind, name, repeat)
        for repeat in range(repeats)
        for kind in links
        for name in rotated(names, repeat)
    ]
    speed = {(row["busy_links"], row["what"], row["repeat"]): row["samples_per_s"] for row in rows}
    shape = f"{num_stages}x{num_pipelines} emulated, b, a full average takes {share:g} of an iteration"
    found: Ratios = {}
    for kind in links:
        for name in exchanges:
            values = [speed[kind, name, r] / speed[kind, NOSYNC, r] for r in range(repeats)]
            low, high = min(values), max(values)
            median = {"what": f"{name}, median", "busy_links": kind, "of_nosync": statistics.median(values)}
            rows.append({**median, "low": low, "high": high})
            if name in KEYS:
                key, goal = KEYS[name]
                meaning = f"samples/s, {shape}, busy {kind}: SemiDecentralized with {name} exchange over NoSync"
                found[key + LINKS[kind]] = ratio(values, None if LINKS[kind] else goal, meaning)
    return rows, found


def _network(mesh: Mesh, rate: float, kind: str) -> Network:
    """Bytes per second between all workers, or between pipelines only."""
    ranks = range(mesh.num_stages * mesh.num_pipelines)
    pipelines = [mesh.locate(rank)[1] for rank in ranks]
    within = WITHIN_A_MACHINE if kind == "between_machines" else rate
    rates = [[within if pipelines[a] == pipelines[b] else rate for b in ranks] for a in ranks]
    devices = tuple(Device("emulated", rank, 1.0) for rank in ranks)
    return Network(devices, [[0.0 for _ in ranks] for _ in ranks], rates)
