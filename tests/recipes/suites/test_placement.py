"""DT-FM's search, which ours is compared with, and emulated links."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from lightning_sdpipe.placement.model import even_stages
from recipes.baselines import genetic_placement as dtfm
from recipes.baselines.dtfm_cost import Weights, evaluate, weights
from recipes.harness.emulated_links import Card
from tests.placement.test_search import random_network


def ticks() -> Callable[[], float]:
    """A clock on which everything takes 0.1 s."""
    numbers = count()
    return lambda: 0.1 * next(numbers)


def even(size: int, seed: int = 0, num_stages: int = 3) -> Weights:
    traffic = even_stages(num_stages, 1e6, 1e6)
    return weights(random_network(random.Random(seed), [1.0] * size), size // num_stages, traffic, "dtfm")


def test_the_gain_of_a_move_is_that_of_the_paper() -> None:
    """§3.4: what the device's links to the other group cost on average, less its fastest link within its own."""
    costs = even(6, num_stages=2)
    labels, links = [0, 0, 0, 1, 1, 1], costs.step[0]
    moves, between = dtfm._Gains(costs, 3).best(labels, [False] * 6)
    fastest = min((links[a][b], a) for a in range(3) for b in range(3) if a != b)
    expected = sum(links[fastest[1]][b] for b in (3, 4, 5)) / 3 - fastest[0]
    assert moves[0].gain == pytest.approx(expected) == pytest.approx(between[0][1])
    assert (moves[0].device, moves[0].target) == (fastest[1], 1)


def test_the_genetic_search_is_seeded_keeps_groups_and_is_better_than_chance() -> None:
    costs, rng = even(12, seed=1), random.Random(0)
    for _ in range(50):
        one, other = ([device // 4 for device in rng.sample(range(12), 12)] for _ in range(2))
        moved = dtfm.move_in_circles(dtfm.crossed(one, other, rng, 4), dtfm._Gains(costs, 4))
        assert Counter(moved) == {0: 4, 1: 4, 2: 4}
    found = [dtfm.genetic(costs, 12, seed, 40.0, clock=ticks()) for seed in (0, 0, 1)]
    assert (found[0].cost, found[0].stages) == (found[1].cost, found[1].stages)
    chance = dtfm.genetic(costs, 12, 0, 10.0, clock=ticks())  # the first generation, which is random
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
    with pytest.raises(KeyError, match="no such rank"):
        card.send(0, 1, lambda: {}["no such rank"]).wait()
