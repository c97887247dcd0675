"""The search finds the known optima and what brute force finds, and does the same on every machine."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import combinations, count, permutations

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.cost import CostModel
from lightning_sdpipe.placement.model import Block, even_stages
from lightning_sdpipe.placement.network import Device, Network
from lightning_sdpipe.placement.planner import PlacementTask, job_of, times_of
from lightning_sdpipe.placement.rate import Job, Layout, Spans, Sync
from lightning_sdpipe.placement.search import Found, Search
from lightning_sdpipe.topology.mesh import rows_of
from recipes.baselines import dtfm_cases as cases
from recipes.baselines.dtfm_cost import evaluate, weights
from recipes.suites.placement import OPTIMA, shuffled
from tests.placement.sites import network_of_sites


def random_network(rng: random.Random, speeds: list[float], memories: list[int | None] | None = None) -> Network:
    size = len(speeds)
    devices = [Device("a", i, speed, (memories or [None] * size)[i]) for i, speed in enumerate(speeds)]

    def matrix(least: float, most: float) -> list[list[float]]:
        return [[rng.uniform(least, most) for _ in range(size)] for _ in range(size)]

    return Network(tuple(devices), matrix(0.0, 0.1), matrix(1e6, 1e8))


def every_cut(num_blocks: int, num_stages: int) -> list[Spans]:
    cuts = combinations(range(1, num_blocks), num_stages - 1)
    return [tuple(range(a, b) for a, b in zip((0, *at), (*at, num_blocks), strict=True)) for at in cuts]


def every_layout(job: Job, num_stages: int) -> Iterator[Layout]:
    """With one cut for all pipelines."""
    size = len(job.network) // num_stages
    for order in permutations(range(len(job.network))):
        rows = tuple(order[first : first + num_stages] for first in range(0, len(order), num_stages))
        if list(rows) == sorted(rows):  # pipelines may be exchanged
            for spans in every_cut(len(job.chain), num_stages):
                if all(job.chain[span[-1]].activation_bytes is not None for span in spans[:-1]):
                    yield Layout(rows, (spans,) * size)


def brute_force(job: Job, num_stages: int) -> float:
    found = [times_of(job, layout) for layout in every_layout(job, num_stages)]
    return min((float(each.seconds[0]) for each in found if not each.misfits[0]), default=math.inf)


@pytest.mark.parametrize("number", OPTIMA)
def test_the_optima_of_the_cases_are_found(number: int) -> None:
    network = shuffled(cases.case(number), 0)
    job = job_of(network, PlacementTask(8, "dtfm", 1, "all_reduce"), cases.stages())
    found = Search(job, [8] * 8, moves=500).run()
    costs = weights(network, 8, cases.stages(), "dtfm")
    assert evaluate(found.layout.stages, costs).total == pytest.approx(OPTIMA[number], abs=1e-6)
    assert 8 * found.seconds == pytest.approx(OPTIMA[number], abs=1e-5)


def test_pipelining_is_made_use_of() -> None:
    """1.59 times cheaper than DT-FM's optimum, at 61 micro-batches."""
    job = job_of(shuffled(cases.case(5), 0), PlacementTask(8, "pipelined", 61, "all_reduce"), cases.stages())
    assert 8 * Search(job, [8] * 8, moves=500).run().seconds == pytest.approx(16.95, abs=5e-3)


@pytest.mark.parametrize(
    ("num_stages", "sync", "model", "seed"),
    [
        (1, "groups", "pipelined", 0),
        (2, "all_reduce", "pipelined", 1),
        (2, "groups", "pipedream", 2),
        (3, "all_reduce", "pipedream", 3),
        (3, "groups", "pipelined", 4),
        (2, "all_reduce", "dtfm", 6),
    ],
)
def test_no_placement_and_no_cut_are_faster(num_stages: int, sync: Sync, model: CostModel, seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng, [rng.choice([0.25, 0.5, 1.0]) for _ in range(6)])
    chain = tuple(
        Block(rng.uniform(0.05, 0.2), 10**5, None if number == 4 else 10**5 * number, 10**5) for number in range(6)
    )
    job = Job(network, chain, 4, model, sync)
    found = Search(job, [num_stages] * (6 // num_stages), moves=12000).run()
    assert found.seconds == pytest.approx(brute_force(job, num_stages), rel=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_what_is_placed_fits(seed: int) -> None:
    """Every block takes 4000 bytes, and 250 for each micro-batch in flight."""
    rng = random.Random(seed)
    memories: list[int | None] = [rng.choice([9_000, 14_000, 30_000, None]) for _ in range(6)]
    network = random_network(rng, [rng.choice([0.5, 1.0]) for _ in range(6)], memories)
    job = Job(network, (Block(0.1, 1000, 1000, 1000, saved_bytes=1000),) * 6, 4, sync="all_reduce")
    expected = brute_force(job, 3)
    if expected == math.inf:
        with pytest.raises(ConfigurationError, match="The model does not fit"):
            Search(job, [3, 3], moves=8000).run()
    else:
        assert Search(job, [3, 3], moves=12000).run().seconds == pytest.approx(expected, rel=1e-6)


def test_the_same_seed_finds_the_same_and_moves_end_the_search() -> None:
    job = job_of(random_network(random.Random(0), [1.0] * 24), PlacementTask(6), even_stages(6, 1e7, 1e6))
    slow = count(step=1e9)
    clocks = (lambda: 0.0, lambda: next(slow))
    one, other = (Search(job, [6] * 4, moves=3000, seed=7, clock=clock).run() for clock in clocks)
    assert one.complete
    assert other.complete
    assert one.layout == other.layout
    assert 3000 <= one.moves < 3000 + 16
    default = times_of(job, Layout(rows_of([6] * 4), one.layout.cuts))
    assert one.seconds < float(default.seconds[0])


def test_a_search_that_is_out_of_time_says_so_and_has_a_placement() -> None:
    job = job_of(random_network(random.Random(0), [1.0] * 24), PlacementTask(6), even_stages(6, 1e7, 1e6))
    ticks = count()
    found = Search(job, [6] * 4, seconds=100.0, clock=lambda: float(next(ticks))).run()
    assert isinstance(found, Found)
    assert not found.complete
    assert found.moves < 100 * 256


def test_missing_links_are_avoided() -> None:
    within = [[0.001, None], [None, 0.001]]
    apart = network_of_sites([("a", 2), ("b", 2)], within, [[1e7, None], [None, 1e7]])
    bridge = [list(row) for row in apart.latency_seconds]
    rates = [list(row) for row in apart.bandwidth_bytes_per_second]
    bridge[0][2] = bridge[2][0] = 0.1
    rates[0][2] = rates[2][0] = 1e6
    traffic = even_stages(4, 1e6, 1e6)
    found = Search(job_of(Network(apart.devices, bridge, rates), PlacementTask(4), traffic), [4], moves=2000).run()
    assert found.layout.rows in (((1, 0, 2, 3),), ((3, 2, 0, 1),))
    with pytest.raises(ConfigurationError, match="needs a link that does not exist"):
        Search(job_of(apart, PlacementTask(4), traffic), [4], moves=2000).run()
