"""The search finds the known optima, proves some of them, and does the same on every machine."""

from __future__ import annotations

import math
import random
from collections.abc import Generator
from itertools import count, permutations
from typing import Any

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement import cases
from lightning_sdpipe.placement.arrange import arrange
from lightning_sdpipe.placement.class_search import ClassCosts, alike, anneal_runs, identical, structures
from lightning_sdpipe.placement.cost import CostModel, Weights, default_order, evaluate, lower_bound, weights
from lightning_sdpipe.placement.exact import prove
from lightning_sdpipe.placement.model import StageTraffic
from lightning_sdpipe.placement.network import Device, Network
from lightning_sdpipe.placement.search import Found, search
from tests.placement.sites import network_of_sites

OPTIMA = {1: 3.439799, 2: 31.634160, 3: 16.086840, 4: 34.802041, 5: 49.218380}


def shuffled(network: Network, seed: int = 0) -> Network:
    """The same network with its devices in another order: the published order is the optimum of some cases."""
    order = list(range(len(network)))
    random.Random(seed).shuffle(order)
    return Network(
        tuple(network.devices[a] for a in order),
        [[network.latency_seconds[a][b] for b in order] for a in order],
        [[network.bandwidth_bytes_per_second[a][b] for b in order] for a in order],
    )


def random_network(size: int, seed: int) -> Network:
    rng = random.Random(seed)

    def matrix(least: float, most: float) -> list[list[float]]:
        return [[rng.uniform(least, most) for _ in range(size)] for _ in range(size)]

    return Network(tuple(Device("a", number, 1.0) for number in range(size)), matrix(0.0, 0.1), matrix(1e6, 1e8))


def brute_force(weights: Weights, num_pipelines: int) -> float:
    devices = range(len(weights.exchange[0]))
    placements = (
        [list(order[first : first + num_pipelines]) for first in range(0, len(order), num_pipelines)]
        for order in permutations(devices)
    )
    return min(evaluate(stages, weights).total for stages in placements)


class Ticks:
    """A clock on which everything takes ``each`` seconds."""

    def __init__(self, each: float) -> None:
        self._ticks, self._each = count(), each

    def __call__(self) -> float:
        return next(self._ticks) * self._each


@pytest.mark.parametrize("number", OPTIMA)
def test_the_optima_of_the_cases_are_found(number: int) -> None:
    costs = weights(shuffled(cases.case(number)), 8, cases.traffic(), "dtfm")
    found = search(costs, 8, seconds=1200, clock=Ticks(0.1) if number in (3, 4) else Ticks(5))
    assert found.cost.total == pytest.approx(OPTIMA[number], abs=1e-6)
    assert evaluate(found.stages, costs) == found.cost
    assert found.optimal == (number in (3, 4))
    assert found.bound <= found.cost.total


def test_pipelining_is_made_use_of() -> None:
    """1.59 times cheaper than DT-FM's optimum, at 61 micro-batches."""
    costs = weights(shuffled(cases.case(5)), 8, cases.traffic(), "pipelined", 61)
    found = search(costs, 8, seconds=200, clock=Ticks(1))
    assert found.cost.total == pytest.approx(16.95, abs=5e-3)


@pytest.mark.parametrize("model", ["dtfm", "pipelined", "pipedream"])
@pytest.mark.parametrize(("stages", "pipelines"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_small_networks_are_solved_and_proved(stages: int, pipelines: int, model: CostModel) -> None:
    costs = weights(random_network(6, stages), pipelines, StageTraffic.even(stages, 1e7, 1e6), model, 4)
    found = search(costs, pipelines, clock=Ticks(0))
    assert found.complete
    assert found.optimal
    assert found.cost.total == pytest.approx(brute_force(costs, pipelines))


@pytest.mark.parametrize("seed", range(3))
def test_uneven_stages_are_placed_too(seed: int) -> None:
    """Without proof, and without reversing anything."""
    rng = random.Random(seed)
    traffic = StageTraffic(
        tuple(rng.uniform(1e6, 1e8) for _ in range(3)), tuple(rng.uniform(1e5, 1e7) for _ in range(2))
    )
    costs = weights(random_network(6, seed), 2, traffic, "pipelined", 4)
    found = search(costs, 2, rounds=12, clock=Ticks(0))
    assert found.complete
    assert found.cost.total == pytest.approx(brute_force(costs, 2))


def test_the_same_seed_finds_the_same_on_a_slower_machine() -> None:
    costs = weights(random_network(24, 0), 4, StageTraffic.even(6, 1e7, 1e6))
    fast, slow = (search(costs, 4, 1.0, seed=7, rounds=2, clock=Ticks(each)) for each in (1e-9, 1e-6))
    assert fast.complete
    assert slow.complete
    assert fast.stages == slow.stages
    assert fast.cost.total < evaluate(default_order(6, 4), costs).total


def test_a_search_that_is_out_of_time_has_a_placement() -> None:
    costs = weights(random_network(24, 0), 4, StageTraffic.even(6, 1e7, 1e6))
    found = search(costs, 4, seconds=0.0)
    assert not found.complete
    assert found.stages == default_order(6, 4)
    ticks = Ticks(1.0)
    search(costs, 4, seconds=50.0, clock=ticks)
    assert ticks() <= 52  # it looks at the clock after every step


def test_missing_links_are_avoided() -> None:
    within = [[0.001, None], [None, 0.001]]
    apart = network_of_sites([("a", 2), ("b", 2)], within, [[1e7, None], [None, 1e7]])
    bridge = [list(row) for row in apart.latency_seconds]
    rates = [list(row) for row in apart.bandwidth_bytes_per_second]
    bridge[0][2] = bridge[2][0] = 0.1
    rates[0][2] = rates[2][0] = 1e6
    network = Network(apart.devices, bridge, rates)
    costs = weights(network, 1, StageTraffic.even(4, 1e6, 1e6))
    assert search(costs, 1, clock=Ticks(0)).stages in ([[1], [0], [2], [3]], [[3], [2], [0], [1]])
    with pytest.raises(ConfigurationError, match="Every placement that was found needs a link that does not exist"):
        search(weights(apart, 1, StageTraffic.even(4, 1e6, 1e6)), 1, clock=Ticks(0))


def test_a_mesh_that_does_not_divide_is_refused() -> None:
    costs = weights(random_network(6, 0), 2, StageTraffic.even(4, 1e6, 1e6))
    with pytest.raises(ConfigurationError, match="6 devices cannot form 2 pipelines of 4 stages, which need 8"):
        search(costs, 2)


def test_devices_fall_into_classes() -> None:
    assert identical(weights(cases.case(2), 8, cases.traffic())).sizes == (4,) * 8 + (32,)
    rng = random.Random(0)
    clean = cases.case(4)
    noisy = Network(
        clean.devices,
        clean.latency_seconds,
        [[rate and rate * rng.lognormvariate(0, 0.03) for rate in row] for row in clean.bandwidth_bytes_per_second],
    )
    costs = weights(noisy, 8, cases.traffic())
    assert len(identical(costs)) == 64
    _, classes = finish(alike(costs))
    assert classes.sizes == (16,) * 4
    exact = weights(clean, 8, cases.traffic())
    assert classes.weights.step[0][0][1] == pytest.approx(exact.step[0][0][16], rel=0.02)


def test_structures_are_compositions_up_to_reversal() -> None:
    rng = random.Random(0)
    assert structures(4, rng) == [(4,), (1, 3), (2, 2), (1, 1, 2), (1, 2, 1), (1, 1, 1, 1)]
    many = structures(12, rng)
    assert all(sum(lengths) == 12 for lengths in many)
    assert len(set(many)) == len(many) > 40


def finish(work: Generator[Any, None, Any]) -> tuple[Any, Any]:
    """The last thing that was yielded, None apart, and what was returned."""
    last = None
    while True:
        try:
            last = next(work) or last
        except StopIteration as end:
            return last, end.value


@pytest.mark.parametrize("model", ["dtfm", "pipelined"])
def test_a_placement_of_classes_costs_what_its_devices_do(model: CostModel) -> None:
    costs = weights(cases.case(5), 8, cases.traffic(), model, 16)
    classes = identical(costs)
    of_classes = ClassCosts(classes.weights)
    outline, _ = finish(anneal_runs((3, 5), classes, of_classes, 8, random.Random(0)))
    groups = outline.groups
    assert [sum(group) for group in groups] == [8] * 8
    assert tuple(map(sum, zip(*groups, strict=True))) == classes.sizes
    assert (groups[0], groups[3]) == (groups[2], groups[7])
    arranged = [stages for stages in arrange(classes.devices(groups), costs, outline.limit) if stages is not None]
    expected = of_classes.total((3, 5), (groups[0], groups[3]), outline.limit)
    assert min(evaluate(stages, costs).total for stages in arranged) <= expected + 1e-9


def proved(costs: Weights, known: float) -> tuple[bool, float]:
    """Whether a proof was found, and the optimum if it is below what is known."""
    classes = identical(costs)
    outline, complete = finish(prove(ClassCosts(classes.weights), classes.sizes, 8, 8, known))
    if outline is None:
        return complete, known
    arranged = [
        stages for stages in arrange(classes.devices(outline.groups), costs, outline.limit) if stages is not None
    ]
    return complete, min(evaluate(stages, costs).total for stages in arranged)


@pytest.mark.parametrize(("model", "optimum"), [("dtfm", OPTIMA[4]), ("pipelined", 12.025713)])
def test_a_proof_finds_what_is_better_and_nothing_where_nothing_is(model: CostModel, optimum: float) -> None:
    costs = weights(cases.case(4), 8, cases.traffic(), model, 61)
    assert proved(costs, 40.0) == (True, pytest.approx(optimum, abs=1e-6))
    assert proved(costs, optimum) == (True, optimum)


def test_too_many_compositions_are_not_tried() -> None:
    assert proved(weights(cases.case(5), 8, cases.traffic(), "dtfm"), 60.0) == (False, 60.0)


def test_a_bound_that_is_met_is_an_optimum() -> None:
    costs = weights(network_of_sites([("a", 4)], [[0.1]], [[1e6]]), 2, StageTraffic.even(2, 1e6, 1e6))
    found = search(costs, 2, seconds=0.0)
    assert found == Found(default_order(2, 2), found.cost, lower_bound(costs, 2), optimal=True)
    assert found.cost.total < math.inf
