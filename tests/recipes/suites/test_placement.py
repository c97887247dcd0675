"""The placement suite: DT-FM's searches, emulated links, and a small run of each part."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest

from lightning_sdpipe.placement.cost import Weights, evaluate, weights
from lightning_sdpipe.placement.model import StageTraffic
from recipes.suites.emulated_links import Card
from recipes.suites.placement import dtfm, search, shaped_links, throughput
from tests.placement.test_search import Ticks, random_network


def even(size: int, seed: int = 0, num_stages: int = 3) -> Weights:
    traffic = StageTraffic.even(num_stages, 1e6, 1e6)
    return weights(random_network(size, seed), size // num_stages, traffic, "dtfm")


def test_children_and_moved_partitions_have_groups_of_the_same_size() -> None:
    rng, costs = random.Random(0), even(12)
    for _ in range(50):
        one, other = sorted(range(12), key=lambda _: rng.random()), sorted(range(12), key=lambda _: rng.random())
        child = dtfm.crossed([d // 4 for d in one], [d // 4 for d in other], rng, 4)
        assert Counter(child) == {0: 4, 1: 4, 2: 4}
        assert Counter(dtfm.move_in_circles(child, dtfm._Gains(costs, 4))) == {0: 4, 1: 4, 2: 4}


def test_the_gain_of_a_move_is_that_of_the_paper() -> None:
    """§3.4: what the device's links to the other group cost on average, less its fastest link within its own."""
    costs = even(6, num_stages=2)
    labels, links = [0, 0, 0, 1, 1, 1], costs.step[0]
    moves, between = dtfm._Gains(costs, 3).best(labels, [False] * 6)
    fastest = min((links[a][b], a) for a in range(3) for b in range(3) if a != b)
    expected = sum(links[fastest[1]][b] for b in (3, 4, 5)) / 3 - fastest[0]
    assert moves[0].gain == pytest.approx(expected) == pytest.approx(between[0][1])
    assert (moves[0].device, moves[0].target) == (fastest[1], 1)


def test_the_genetic_search_is_seeded_and_better_than_chance() -> None:
    costs = even(12, seed=1)
    found = [dtfm.genetic(costs, 12, seed, 40.0, clock=Ticks(0.1)) for seed in (0, 0, 1)]
    assert (found[0].cost, found[0].stages) == (found[1].cost, found[1].stages)
    chance = dtfm.genetic(costs, 12, 0, 10.0, clock=Ticks(0.1))  # the first generation, which is random
    assert all(progress.cost <= chance.cost for progress in found)
    assert evaluate(found[2].stages, costs).total == pytest.approx(found[2].cost)


class Work:
    """Begins when the link delivers."""

    def __init__(self) -> None:
        self.begun = 0.0

    def start(self) -> Any:
        self.begun = time.monotonic()
        return self

    def wait(self, limit: object) -> None:
        assert self.begun


def test_messages_of_one_card_follow_each_other_and_latencies_overlap() -> None:
    card, works = Card([0.02, 0.05], [1e6, 1e6]), [Work(), Work(), Work()]
    start = time.monotonic()
    held = [card.send(to, 20_000, work.start) for to, work in zip((0, 1, 0), works, strict=True)]
    for transfer in held:
        transfer.wait()
    taken = [work.begun - start for work in works]
    assert all(seconds >= least for seconds, least in zip(taken, (0.04, 0.09, 0.08), strict=True))
    assert taken[0] <= taken[2] <= taken[1]  # the second is longer under way


def test_a_transfer_that_cannot_begin_fails_where_it_is_waited_for() -> None:
    def start() -> Any:
        raise ValueError("no such rank")

    with pytest.raises(RuntimeError, match="no such rank"):
        Card([0.0], [1e9]).send(0, 1, start).wait()


@pytest.mark.distributed
def test_an_emulated_link_is_no_faster_than_it_says() -> None:
    assert max(shaped_links.timed(2e6, 100_000, 1, 2)) >= 0.05  # the receiver's clock may start late


def test_the_search_is_compared_on_every_network() -> None:
    rows, ratios = search.measure(optimum_seconds=0.05, ours_seconds=0.2, genetic_seconds=0.2, repeats=1, seed=3)
    assert list(ratios) == [
        *(f"optimum/{number}" for number in range(1, 6)),
        *("ga60/ten", "ga60/noise5", "ga60/noise4", "reach/4", "pipelined/5/m61"),
    ]
    assert all(ratios[f"optimum/{number}"]["value"] > 1 - 1e-6 for number in range(1, 6))
    assert {row["search"] for row in rows} == {"ours", "genetic"}


@pytest.mark.distributed
def test_a_placement_is_trained_with_beside_the_default_order() -> None:
    rows, ratios = throughput.measure(
        num_stages=2,
        num_pipelines=2,
        num_micro_batches=2,
        micro_batch_seconds=0.01,
        num_parameters=65536,
        features=64,
        slower=100,
        iterations=3,
        warm_up=1,
        repeats=1,
        window="inf",
        seed=0,
    )
    assert [row["what"] for row in rows] == ["placed, emulated links", "default, emulated links"]
    default = rows[1]
    least = 2 * 65536 * 4 / 2 * 100 / throughput.ACROSS[1]  # to send half of a stage over the ocean, twice
    assert default["s_per_mini_batch"] > least
    assert default["predicted_s"] > rows[0]["predicted_s"]
    assert set(ratios) == {"placed/default", "placed/predicted"}
