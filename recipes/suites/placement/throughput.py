"""Gain of a placement in a real training over *emulated* slow links, and what its cost had promised.

Two regions with the links of DT-FM's case 3. Consecutive ranks form a pipeline by default, within a region, so that
every average crosses the ocean. Compute is emulated too (stages sleep); processes, sockets, the scheduler, averaging
and the optimizer are real. Bandwidths and messages are both so many times smaller, which leaves all times as they are,
and the processor less to copy.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_sdpipe.placement.model import Block, Model
from lightning_sdpipe.placement.network import Device, Network
from lightning_sdpipe.placement.planner import PlacementTask, place
from lightning_sdpipe.topology.groups import this_host
from lightning_sdpipe.topology.placement_file import write_placement
from recipes.harness.emulated_links import emulated_links
from recipes.suites.grid import Case, Grid, Ratios, Row, ratio, ratios, rotated, versus
from recipes.suites.trainings import Named, Training, quiet, strategy_of, train


@dataclass(frozen=True)
class Placed:
    """A training, whose workers may be placed."""

    training: Training
    placed: bool


WITHIN, ACROSS = (1e-3, 5e9 / 8), (11e-3, 1.12e9 / 8)
"""Seconds and bytes per second of DT-FM's case 3 (Ohio and Virginia), as its code has them."""


def measure(
    *, training: Mapping[str, Any], slower: float, repeats: int, window: float | str, seed: int
) -> tuple[list[Row], Ratios]:
    """Return seconds of a mini-batch of every pipeline, in the default order and placed.

    Args:
        training: fields of a :class:`~recipes.suites.trainings.Training`.
        slower: by what the bandwidths are divided.
        repeats: trainings of each.
        window: of the semi-decentralised synchronisation.
        seed: of the weights, and of the search.
    """
    quiet()
    method = Named("sdpipe", {"_target_": "lightning_sdpipe.SemiDecentralized", "window": window})
    case = Training(method=method, seed=seed, **training)
    assert isinstance(case.num_stages, int)
    micro_batches, cut = case.num_micro_batches, case.num_micro_batches * 4 * case.features
    block = Block(micro_batches * case.block_seconds, 4 * case.block_parameters, cut, cut, count=case.num_stages)
    network = two_regions(case.workers, slower, Model("EmulatedChain", (block,)))
    placed = place(network, PlacementTask(case.num_stages, "pipelined", micro_batches, "all_reduce", seed=seed))
    expected = {"placed": placed.seconds, "default": placed.default_seconds}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "placement.json")
        write_placement(path, placed.placement("suite=placement"))

        def trained(asked: Placed) -> Row:
            strategy = strategy_of(case, placement=path if asked.placed else None)
            reports = train(case, strategy=strategy, links=emulated_links(placed.network))
            used = [report.used(case.warm_up).clock / (case.iterations - case.warm_up) for report in reports]
            return {"s_per_mini_batch": statistics.mean(used)}

        cases = [
            Case({"what": name, "repeat": repeat, "predicted_s": expected[name]}, Placed(case, name == "placed"))
            for repeat in range(repeats)
            for name in rotated([*expected], repeat)
        ]
        rows = Grid().run(cases, trained, "s_per_mini_batch")
    gain = expected["default"] / expected["placed"]
    meaning = f"throughput, {case.shape}, two regions, emulated: placed over the default order"
    found = ratios(rows, {"placed/default": versus(meaning, "s_per_mini_batch", "default", "placed", 1.3)})
    predicted = {column: found["placed/default"][column] / gain for column in ("value", "low", "high")}
    meaning = f"that, over the gain that the cost predicts ({gain:.3f})"
    return rows, found | {"placed/predicted": ratio([0.0], 0.9, meaning) | predicted}


def two_regions(devices: int, slower: float, model: Model) -> Network:
    """Return half of the devices in each. They are the ranks of this machine."""
    region = [2 * rank // devices for rank in range(devices)]
    links = [[WITHIN if a == b else ACROSS for b in region] for a in region]
    return Network(
        tuple(Device(this_host(), rank, 1.0) for rank in range(devices)),
        [[latency for latency, _ in row] for row in links],
        [[rate / slower for _, rate in row] for row in links],
        "two regions, emulated",
        model,
    )
