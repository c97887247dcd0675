"""The rate of a layout is that of its formulas, and where only links cost anything, DT-FM's cost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lightning_sdpipe.placement.cost import CostModel
from lightning_sdpipe.placement.model import Block, even_stages
from lightning_sdpipe.placement.network import Device, Network
from lightning_sdpipe.placement.planner import PlacementTask, job_of, times_of
from lightning_sdpipe.placement.rate import Job, Layout, Shape, times
from recipes.baselines import dtfm_cases as cases
from recipes.baselines.dtfm_cost import evaluate, weights
from tests.placement.sites import network_of_sites


def a_network(speeds: list[float], rate: float = 1e9) -> Network:
    size = len(speeds)
    devices = tuple(Device("a", number, speed) for number, speed in enumerate(speeds))
    return Network(devices, [[0.001] * size for _ in range(size)], [[rate] * size for _ in range(size)])


@pytest.mark.parametrize("model", ["dtfm", "pipelined", "pipedream"])
def test_links_alone_cost_what_dtfm_says(model: CostModel) -> None:
    rng, traffic = random.Random(0), even_stages(8, cases.STAGE_BYTES, 4e8)
    job = job_of(cases.case(4), PlacementTask(8, model, 16, "all_reduce"), traffic)
    costs = weights(cases.case(4), 8, traffic, model, 16)
    for _ in range(5):
        order = rng.sample(range(64), 64)
        rows = tuple(tuple(order[first : first + 8]) for first in range(0, 64, 8))
        layout = Layout(rows, (tuple(range(j, j + 1) for j in range(8)),) * 8)
        assert 8 * float(times_of(job, layout).seconds[0]) == pytest.approx(evaluate(layout.stages, costs).total)


def test_seconds_are_those_of_the_formula() -> None:
    chain = (Block(0.4, 0, 10**9, 10**9), Block(0.2, 0, 0, 0))
    cut = (range(1), range(1, 2))
    layout = Layout(((0, 1),), (cut,))
    # of one of four micro-batches: 0.1 s, 2 · (1 ms + 0.25 s), 0.1 s; then three at (0.4 + 2.0) / 4
    found = times_of(Job(a_network([1.0, 0.5]), chain, 4), layout)
    assert found.pipelines[0] == pytest.approx([0.1 + 0.502 + 0.1 + 3 * 2.4 / 4])
    assert times_of(Job(a_network([1.0, 0.5]), chain, 4, "pipedream"), layout).pipelines[0] == pytest.approx([2.4])
    of_three = (Block(0.4, 0, 10**9, 10**9), Block(0.3, 0, 5 * 10**8, 5 * 10**8), Block(0.1, 0, 0, 0))
    spans = (range(1), range(1, 2), range(2, 3))
    middle = times_of(Job(a_network([1.0] * 3), of_three, 1, "pipedream"), Layout(((0, 1, 2),), (spans,)))
    assert middle.pipelines[0] == pytest.approx([0.4 + 2.0]), "what comes in overlaps what goes out"


def test_pipelines_wait_for_all_or_for_their_groups() -> None:
    chain = (Block(1.0, 10**9, 0, 0),)
    layout = Layout(((0,), (1,)), ((range(1),),) * 2)
    share = 2 * (0.001 + 1 / 2)
    together = times_of(Job(a_network([1.0, 0.5]), chain, 1, sync="all_reduce"), layout)
    groups = times_of(Job(a_network([1.0, 0.5]), chain, 1), layout)
    assert 2 * float(together.seconds[0]) == pytest.approx(2.0 + share)
    assert float(groups.seconds[0]) == pytest.approx(1 / (1 / (1 + share) + 1 / (2 + share)))


def test_large_groups_are_averaged_in_parts() -> None:
    chain, network = (Block(0.1, 10**9, 0, 0),), a_network([1.0] * 8)
    layout = Layout(tuple((device,) for device in range(8)), ((range(1),),) * 8)
    assert times_of(Job(network, chain, 1, sync="all_reduce"), layout).averaging[0] == pytest.approx(
        7 * 2 * (0.001 + 1 / 8)
    )
    assert times_of(Job(network, chain, 1), layout).averaging[0] == pytest.approx(3 * 2 * (0.001 + 1 / 4))


def test_a_worker_of_an_unlike_cut_averages_what_it_has_in_common_with_each() -> None:
    """A pipeline of one stage moves the whole model, one of two a part of it."""
    chain = tuple(Block(0.1, amount, 0, 0) for amount in (10**9, 2 * 10**9, 3 * 10**9))
    layout = Layout(((0,), (1, 2)), ((range(3),), (range(1), range(1, 3))))
    found = times_of(Job(a_network([1.0] * 3), chain, 2, sync="all_reduce"), layout)
    assert found.averaging[0] == pytest.approx([0.004 + 6.0, 0.002 + 1.0, 0.002 + 5.0])


def test_what_does_not_fit_and_links_that_are_missing_are_counted() -> None:
    block = Block(0.1, 1000, 1000, 1000, saved_bytes=1000)
    devices = tuple(Device("a", number, 1.0, memory) for number, memory in enumerate((20_000, 4_000, 20_000, 20_000)))
    links = [[1e9] * 4 for _ in range(4)]
    job = Job(Network(devices, [[0.0] * 4] * 4, links), (block,) * 4, 4)
    cut = (range(2), range(2, 4))
    assert times_of(job, Layout(((0, 1), (2, 3)), (cut, cut))).misfits[0] == 1, (
        "8,000 bytes, and 500 for each in flight"
    )
    assert times_of(Job(job.network, job.chain, 4, last=0), Layout(((0, 2),), (cut,))).misfits[0] == 1
    apart = network_of_sites([("a", 2), ("b", 2)], [[0.1, None], [None, 0.1]], [[1e7, None], [None, 1e7]])
    found = times_of(Job(apart, (block,) * 4, 4), Layout(((0, 1), (2, 3)), (cut, cut)))
    assert found.misfits[0] == 4, "each stage averages over one, in both directions"
    assert np.isfinite(found.seconds).all()


def test_power_means_approach_the_maxima_from_below() -> None:
    job = job_of(cases.case(5), PlacementTask(8, "pipelined", 8, "all_reduce"), cases.stages())
    rows = tuple(tuple(range(first, first + 8)) for first in range(0, 64, 8))
    shape = Shape(job, (tuple(range(j, j + 1) for j in range(8)),) * 8)
    order = np.array([[device for row in rows for device in row]])
    smooth = [float(times(job, shape, order, power).smooth[0]) for power in (2, 4, 6)]
    assert smooth == sorted(smooth)
    assert times(job, shape, order).smooth == times(job, shape, order).seconds
