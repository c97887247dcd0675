"""Quality of placements over time: our search against known optima, and against DT-FM's genetic search.

Both search 64 devices for 8 × 8 with the published code's bytes. Seconds are of the processor, of one core, so that
other programs on the machine favour neither. The published order of devices is the optimum of some cases, so
devices are shuffled first.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

from lightning_sdpipe.placement import cases
from lightning_sdpipe.placement.cost import Weights, evaluate, weights
from lightning_sdpipe.placement.network import Network
from lightning_sdpipe.placement.search import Found, search
from recipes.baselines.genetic_placement import genetic
from recipes.suites.grid import Ratios, Row, ratio

PIPELINES = 8
OPTIMA = {1: 3.439799, 2: 31.634160, 3: 16.086840, 4: 34.802041, 5: 49.218380}
"""Seconds: proved for cases 3 and 4."""

NOISE, NOISE_SEED = 0.2, 0
"""Standard deviation of the logarithm of every latency and bandwidth, the same in both directions."""

GOALS = {"ten": 1.18, "noise5": 1.10, "noise4": 1.08}


def measure(
    *, optimum_seconds: float, ours_seconds: float, genetic_seconds: float, repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Costs that both searches reach.

    Args:
        optimum_seconds: for ours, on the five cases.
        ours_seconds: for ours, on networks whose optimum is not known.
        genetic_seconds: for DT-FM's.
        repeats: seeds of the searches.
        seed: the first of them, and that of the order of devices.
    """
    rows: list[Row] = []
    ratios: Ratios = {}
    seeds = range(seed, seed + repeats)
    for number, optimum in OPTIMA.items():
        costs = weights(shuffled(cases.case(number), seed), PIPELINES, cases.traffic(), "dtfm")
        over = [_ours(f"case {number}", costs, optimum_seconds, s, rows).cost.total / optimum for s in seeds]
        ratios[f"optimum/{number}"] = ratio(over, 1.000001, f"cost of our placement over the optimum's, case {number}")
    networks = {"ten": cases.named("ten_cities"), "noise5": noisy(cases.case(5)), "noise4": noisy(cases.case(4))}
    for name, network in networks.items():
        costs = weights(shuffled(network, seed), PIPELINES, cases.traffic(), "dtfm")
        gains = []
        for s in seeds:
            ours = _ours(name, costs, ours_seconds, s, rows).cost.total
            gains.append(_genetic(name, costs, genetic_seconds, s, rows) / ours)
        meaning = f"cost after {genetic_seconds:g} s of the genetic search over ours after {ours_seconds:g} s, {name}"
        ratios[f"ga60/{name}"] = ratio(gains, GOALS[name], meaning)
    costs = weights(shuffled(cases.case(4), seed), PIPELINES, cases.traffic(), "dtfm")
    sooner = []
    for s in seeds:
        theirs = _genetic("case 4", costs, genetic_seconds, s, rows)
        found = _ours("case 4", costs, ours_seconds, s, rows)
        reached = next((seconds for seconds, cost in found.improvements if cost <= theirs), math.inf)
        sooner.append(genetic_seconds / reached)
    meaning = f"{genetic_seconds:g} s of the genetic search over ours until it costs as little, case 4"
    ratios["reach/4"] = ratio(sooner, 20.0, meaning)
    ratios["pipelined/5/m61"] = ratio(
        [_pipelined(optimum_seconds, s, rows) for s in seeds],
        1.55,
        "cost, with 61 micro-batches in the pipeline, of the placement that DT-FM's cost prefers over ours, case 5",
    )
    return rows, ratios


def _ours(name: str, costs: Weights, seconds: float, seed: int, rows: list[Row]) -> Found:
    found = search(costs, PIPELINES, seconds, seed, clock=time.process_time)
    at = found.improvements[-1][0] if found.improvements else 0.0
    rows.append(_row(name, "ours", seed, seconds, found.cost.total, at) | {"bound": found.bound})
    return found


def _genetic(name: str, costs: Weights, seconds: float, seed: int, rows: list[Row]) -> float:
    progress = genetic(costs, len(costs.exchange[0]), seed, seconds, clock=time.process_time)
    rows.append(_row(name, "genetic", seed, seconds, progress.cost, progress.improvements[-1][0]) | {"bound": None})
    return progress.cost


def _pipelined(seconds: float, seed: int, rows: list[Row]) -> float:
    network, traffic = shuffled(cases.case(5), seed), cases.traffic()
    plain = weights(network, PIPELINES, traffic, "dtfm")
    overlapping = weights(network, PIPELINES, traffic, "pipelined", cases.MICRO_BATCHES)
    theirs = evaluate(search(plain, PIPELINES, seconds, seed, clock=time.process_time).stages, overlapping)
    return theirs.total / _ours("case 5, pipelined", overlapping, seconds, seed, rows).cost.total


def _row(name: str, what: str, seed: int, seconds: float, cost: float, at: float) -> Row:
    return {"what": name, "search": what, "seed": seed, "given_s": seconds, "cost_s": cost, "found_at_s": at}


def shuffled(network: Network, seed: int) -> Network:
    """The same network with its devices in another order."""
    order = list(range(len(network)))
    random.Random(seed).shuffle(order)
    return Network(
        tuple(network.devices[a] for a in order),
        [[network.latency_seconds[a][b] for b in order] for a in order],
        [[network.bandwidth_bytes_per_second[a][b] for b in order] for a in order],
    )


def noisy(network: Network) -> Network:
    """The same links, each a little faster or slower, as a measurement would have them."""
    rng = random.Random(NOISE_SEED)

    def disturbed(rows: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
        made = [list(row) for row in rows]
        for a, row in enumerate(made):
            for b in range(a):
                value = row[b]
                made[a][b] = made[b][a] = None if value is None else value * rng.lognormvariate(0.0, NOISE)
        return made

    return Network(network.devices, disturbed(network.latency_seconds), disturbed(network.bandwidth_bytes_per_second))
