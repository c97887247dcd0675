"""Devices of unlike speed and memory, against all placements and all cuts of small meshes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import combinations, permutations

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.cost import Stages, default_order
from lightning_sdpipe.placement.heterogeneous import best_cut, place_heterogeneous
from lightning_sdpipe.placement.model import Block
from lightning_sdpipe.placement.network import Device, Network
from lightning_sdpipe.placement.throughput import CutJob, PlacementJob, Spans, Sync, combined


def a_network(
    speeds: list[float], memories: list[int | None] | None = None, rng: random.Random | None = None
) -> Network:
    size = len(speeds)
    devices = [Device("a", i, speed, (memories or [None] * size)[i]) for i, speed in enumerate(speeds)]
    rates = [[rng.uniform(1e6, 1e8) if rng else 1e9 for _ in range(size)] for _ in range(size)]
    return Network(tuple(devices), [[0.001] * size for _ in range(size)], rates)


def a_job(
    network: Network,
    num_stages: int,
    sync: Sync = "all_reduce",
    chain: tuple[Block, ...] = (Block(0.1, 1000, 1000, 1000, count=6),) * 1,
    flush: bool = True,
) -> PlacementJob:
    blocks = tuple(block for block in chain for _ in range(block.count))
    ahead = list(range(num_stages, 0, -1))
    return PlacementJob(network, blocks, num_stages, 4, flush, sync, ahead, [0] * num_stages, 2.0)


def every_cut(num_blocks: int, num_stages: int) -> list[Spans]:
    cuts = combinations(range(1, num_blocks), num_stages - 1)
    return [tuple(range(a, b) for a, b in zip((0, *at), (*at, num_blocks), strict=True)) for at in cuts]


def every_placement(job: PlacementJob) -> Iterator[Stages]:
    size = job.num_pipelines
    for order in permutations(range(len(job.network))):
        if list(order[:size]) == sorted(order[:size]):  # pipelines may be exchanged
            yield [list(order[first : first + size]) for first in range(0, len(order), size)]


def brute_force(job: PlacementJob) -> float:
    best = math.inf
    for spans in every_cut(len(job.chain), job.num_stages):
        if all(job.chain[span[-1]].activation_bytes is not None for span in spans[:-1]):
            cut = CutJob(job, spans)
            best = min(best, *(cut.seconds(stages) for stages in every_placement(job)))
    return best


def placed(job: PlacementJob, seed: int = 0, rounds: int = 3) -> tuple[Stages, Spans]:
    start = default_order(job.num_stages, job.num_pipelines)
    found = [step for step in place_heterogeneous(job, [start], random.Random(seed), rounds) if step is not None]
    return found[-1]


@pytest.mark.parametrize(
    ("num_stages", "sync", "flush", "seed"),
    [
        (1, "groups", True, 0),
        (2, "all_reduce", True, 1),
        (2, "groups", False, 2),
        (3, "all_reduce", False, 3),
        (3, "groups", True, 4),
        (6, "all_reduce", True, 5),
    ],
)
def test_no_placement_and_no_cut_are_faster(num_stages: int, sync: Sync, flush: bool, seed: int) -> None:
    rng = random.Random(seed)
    network = a_network([rng.choice([0.25, 0.5, 1.0]) for _ in range(6)], rng=rng)
    chain = tuple(
        Block(rng.uniform(0.05, 0.2), 10**5, None if number == 4 and num_stages < 6 else 10**5 * number, 10**5)
        for number in range(6)
    )
    job = a_job(network, num_stages, sync, chain, flush)
    stages, spans = placed(job)
    assert CutJob(job, spans).seconds(stages) == pytest.approx(brute_force(job), rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_placed_fits(seed: int) -> None:
    """Every block takes 4000 bytes, and 250 for each micro-batch in flight."""
    rng = random.Random(seed)
    memories: list[int | None] = [rng.choice([9_000, 14_000, 30_000, None]) for _ in range(6)]
    network = a_network([rng.choice([0.5, 1.0]) for _ in range(6)], memories, rng)
    job = a_job(network, 3, chain=(Block(0.1, 1000, 1000, 1000, saved_bytes=1000, count=6),))
    expected = brute_force(job)
    if expected == math.inf:
        with pytest.raises(ConfigurationError, match="The model does not fit"):
            placed(job)
    else:
        stages, spans = placed(job)
        assert CutJob(job, spans).seconds(stages) == pytest.approx(expected, rel=1e-6)


def test_a_model_that_fits_nowhere_is_refused_with_what_is_lacking() -> None:
    job = a_job(a_network([1.0] * 4, [9_000] * 4), 2)
    with pytest.raises(ConfigurationError, match=r"needs 11\.72 KiB where there are 8\.79 KiB: 2\.93 KiB too much"):
        placed(job)


def test_all_reduce_wants_equal_speeds_within_a_stage_and_groups_within_a_pipeline_too() -> None:
    """Two devices are half as fast. As one stage, with two of six blocks, they do no harm. As one pipeline, they slow
    down that one only; spread over both, each of them."""
    network = a_network([1.0, 0.5, 1.0, 0.5])
    stages, spans = placed(a_job(network, 2))
    assert sorted(map(len, spans)) == [2, 4]
    assert sorted(map(sorted, stages)) == [[0, 2], [1, 3]]
    rows, spread = [[0, 1], [2, 3]], [[0, 1], [3, 2]]
    cut = (range(3), range(3, 6))
    for sync, gain in (("all_reduce", 1.0), ("groups", 3 / 2)):
        job = CutJob(a_job(network, 2, sync, flush=False), cut)  # type: ignore[arg-type]
        assert job.seconds(spread) / job.seconds(rows) == pytest.approx(gain, rel=0.01)


def test_seconds_are_those_of_the_formula() -> None:
    network = a_network([1.0, 0.5])
    job = a_job(network, 2, chain=(Block(0.4, 0, 10**9, 10**9), Block(0.2, 0, 0, 0)))
    cut = CutJob(job, best_cut(job, [[0], [1]]))
    # of one of four micro-batches: 0.1 s, 2 · (1 ms + 0.25 s), 0.1 s; then three at (0.4 + 2.0) / 4
    assert cut.pipeline_seconds([0, 1]) == pytest.approx(0.1 + 0.502 + 0.1 + 3 * 2.4 / 4)
    without_flush = CutJob(a_job(network, 2, chain=job.chain, flush=False), cut.spans)
    assert without_flush.pipeline_seconds([0, 1]) == pytest.approx(2.4)
    assert combined([1.0, 3.0], 1.0, "all_reduce") == 4.0
    assert combined([1.0, 3.0], 1.0, "groups") == pytest.approx(2 / (1 / 2 + 1 / 4))


def test_large_groups_are_averaged_in_parts() -> None:
    network = a_network([1.0] * 8)
    chain = (Block(0.1, 10**9, 0, 0),)
    share = 2 * (0.001 + 1 / 8)
    assert CutJob(a_job(network, 1, "all_reduce", chain), [range(1)]).seconds([list(range(8))]) == pytest.approx(
        0.1 + 7 * share
    )
    share = 2 * (0.001 + 1 / 4)
    assert CutJob(a_job(network, 1, "groups", chain), [range(1)]).group_seconds(0, range(8)) == pytest.approx(3 * share)
