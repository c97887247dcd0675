"""Gain of a placement in a real training over *emulated* slow links, and what its cost had promised.

Two regions with the links of DT-FM's case 3. Consecutive ranks form a pipeline by default, within a region, so that
every average crosses the ocean. Compute is emulated too (stages sleep); processes, sockets, the scheduler, averaging
and the optimizer are real. Bandwidths and messages are both so many times smaller, which leaves all times as they are,
and the processor less to copy.
"""

from __future__ import annotations

import statistics
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_sdpipe import SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.placement.model import Block, Model
from lightning_sdpipe.placement.network import Device, Network
from lightning_sdpipe.placement.planner import PlacementResult, PlacementTask, place
from lightning_sdpipe.topology.groups import this_host
from lightning_sdpipe.topology.placement_file import write_placement
from recipes.suites.emulated import EmulatedChain, passes
from recipes.suites.emulated_links import emulated_links
from recipes.suites.ratios import Ratios, Row, ratio, rotated
from recipes.suites.trainings import fit, quiet, random_features
from recipes.suites.worker_reports import Probe, read_reports

WITHIN, ACROSS = (1e-3, 5e9 / 8), (11e-3, 1.12e9 / 8)
"""Seconds and bytes per second of DT-FM's case 3 (Ohio and Virginia), as its code has them."""

TIMEOUT = timedelta(minutes=2)


def measure(
    *,
    num_stages: int,
    num_pipelines: int,
    num_micro_batches: int,
    micro_batch_seconds: float,
    num_parameters: int,
    features: int,
    slower: float,
    iterations: int,
    warm_up: int,
    repeats: int,
    window: float | str,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Seconds of a mini-batch of every pipeline, in the default order and placed.

    Args:
        num_stages: M.
        num_pipelines: N.
        num_micro_batches: m.
        micro_batch_seconds: of a micro-batch on one stage, forward and backward.
        num_parameters: of a stage.
        features: of the sample that a micro-batch is.
        slower: by what the bandwidths are divided.
        iterations: of each training.
        warm_up: how many of them do not count.
        repeats: trainings of each.
        window: of the semi-decentralised synchronisation.
        seed: of the weights, and of the search.
    """
    quiet()
    sample, seconds = 4 * features, num_micro_batches * micro_batch_seconds
    cut = num_micro_batches * sample
    block = Block(seconds, 4 * num_parameters, cut, cut, count=num_stages)
    network = two_regions(num_stages * num_pipelines, slower, Model("EmulatedChain", (block,)))
    placed = place(
        network, PlacementTask(num_stages, "pipelined", num_micro_batches, "all_reduce", seed=seed, seconds=2.0)
    )
    assert placed.seconds is not None
    assert placed.default_seconds is not None
    expected = {"placed": placed.seconds, "default": placed.default_seconds}
    rows: list[Row] = []
    gains = []
    for repeat in range(repeats):
        measured = {}
        for name in rotated(list(expected), repeat):
            torch.manual_seed(seed)
            module = EmulatedChain(num_stages, *passes(micro_batch_seconds), num_parameters=num_parameters)
            batches = iterations * num_pipelines
            loader = random_features(batches, num_micro_batches, features)
            measured[name] = _train(placed, name == "placed", module, loader, iterations, warm_up, window)
            row = {"what": f"{name}, emulated links", "repeat": repeat, "s_per_mini_batch": measured[name]}
            rows.append(row | {"predicted_s": expected[name]})
        gains.append(measured["default"] / measured["placed"])
    shape, predicted = f"{num_stages} × {num_pipelines}", expected["default"] / expected["placed"]
    meaning = f"throughput, {shape}, two regions, emulated: placed over the default order"
    return rows, {
        "placed/default": ratio(gains, 1.3, meaning),
        "placed/predicted": ratio(
            [gain / predicted for gain in gains], 0.9, f"that, over the gain that the cost predicts ({predicted:.3f})"
        ),
    }


def two_regions(devices: int, slower: float, model: Model) -> Network:
    """Half of the devices in each. They are the ranks of this machine."""
    region = [2 * rank // devices for rank in range(devices)]
    links = [[WITHIN if a == b else ACROSS for b in region] for a in region]
    return Network(
        tuple(Device(this_host(), rank, 1.0) for rank in range(devices)),
        [[latency for latency, _ in row] for row in links],
        [[rate / slower for _, rate in row] for row in links],
        "two regions, emulated",
        model,
    )


def _train(
    placed: PlacementResult,
    follows: bool,
    module: L.LightningModule,
    loader: DataLoader[Any],
    iterations: int,
    warm_up: int,
    window: float | str,
) -> float:
    """Seconds of a mini-batch, the mean over the workers."""
    with tempfile.TemporaryDirectory() as directory, emulated_links(placed.network):
        path = Path(directory, "placement.json")
        write_placement(path, placed.placement("suite=placement"))
        strategy = SDPipeStrategy(
            placed.asked.num_stages,
            SemiDecentralized(window=window),
            data="sharded",
            num_micro_batches=placed.asked.micro_batches,
            placement=path if follows else None,
            timeout=TIMEOUT,
            start_method="fork",
        )
        reports = Path(directory, "reports")
        reports.mkdir()
        probe = Probe(reports, warm_up)
        fit(module, [loader], strategy, len(placed.network), probe, limit_train_batches=iterations)
        return statistics.mean(report.used.clock / report.iterations for report in read_reports(reports))
