"""Pipelines of unlike depths: the search against all splits of small fleets. What it finds for known ones
is in test_unlike_devices."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.network import Network
from lightning_sdpipe.placement.planner import PlacementTask, job_of, place, place_freely, times_of
from lightning_sdpipe.placement.rate import Job, Layout, Sync
from lightning_sdpipe.placement.search import Search
from tests.placement.fleets import FLEETS, MICRO_BATCHES, Devices, fleet
from tests.placement.test_search import every_cut

ASKED = PlacementTask(1, num_micro_batches=MICRO_BATCHES, moves=10_000)


def random_fleet(seed: int, most: int) -> Network:
    """With memory for a third of the model to all of it, and a cut that costs next to nothing or a lot."""
    rng = random.Random(seed)
    classes, left = [], most
    while left:
        number = rng.randint(1, min(left, 3))
        classes.append(Devices(f"host{len(classes)}", number, rng.choice((0.2, 0.5, 0.7, 1.0)), rng.uniform(6, 24)))
        left -= number
    return fleet(classes, 1.0e9, blocks=6, cut=rng.choice((0.001, 0.02, 0.2)))


def every_split(devices: Sequence[int]) -> Iterator[list[list[int]]]:
    """All sets of pipelines of all devices or some."""
    if not devices:
        yield []
        return
    one, *others = devices
    for split in every_split(others):
        yield split
        yield [[one], *split]
        for number, part in enumerate(split):
            yield [*split[:number], [one, *part], *split[number + 1 :]]


def brute_force(job: Job) -> float:
    """Most mini-batches per second of every split of the devices, where links cost nothing beyond a pipeline's own: so
    the fastest order and cut of each pipeline count."""
    best: dict[tuple[int, ...], float] = {}
    most = 0.0
    for split in every_split(range(len(job.network))):
        rates = []
        for part in map(tuple, map(sorted, split)):
            if part not in best:
                layouts = [
                    Layout((order,), (spans,))
                    for order, spans in product(permutations(part), every_cut(len(job.chain), len(part)))
                ]
                found = [times_of(job, layout) for layout in layouts]
                best[part] = max((1 / float(t.seconds[0]) for t in found if not t.misfits[0]), default=0.0)
            rates.append(best[part])
        if rates and min(rates):
            most = max(most, len(rates) * min(rates) if job.sync == "all_reduce" else sum(rates))
    return most


@pytest.mark.parametrize("sync", ["groups", "all_reduce"])
@pytest.mark.parametrize("seed", range(2))
def test_no_split_of_five_devices_is_faster(seed: int, sync: Sync) -> None:
    job = job_of(random_fleet(seed, 5), replace(ASKED, sync=sync), None)
    expected = brute_force(job)
    if expected:
        found = Search(job, [5], free=True, moves=20_000).run()
        assert 1 / found.seconds == pytest.approx(expected, rel=0.01)
    else:
        with pytest.raises(ConfigurationError):
            Search(job, [5], free=True, moves=2_000).run()


def test_depths_may_be_given() -> None:
    placed = place(FLEETS["5 equal (24)"], replace(ASKED, num_stages=(2, 3), num_micro_batches=None))
    assert sorted(placed.layout.depths) == [2, 3]
    assert placed.micro_batches == 3, "as many as the deepest has stages"


def test_rank_zero_runs_a_last_stage() -> None:
    network = FLEETS["5090 + 4090 + 3090"]  # one alone, and the others together
    for first in range(3):
        placed = place_freely(network, replace(ASKED, first=first, moves=4_000))[0][-1]
        assert placed.layout.rows[0][-1] == first == placed.first
        assert sorted(device for row in placed.layout.rows for device in row) == [0, 1, 2]
        free = placed.num_pipelines / (placed.seconds - placed.price)
        assert free == pytest.approx(2.034, abs=0.001)


def test_a_device_that_is_left_out_is_not_rank_zero_unless_it_is_asked_for() -> None:
    network = fleet([Devices("small", 1, 0.5, 2), Devices("large", 1, 1.0, 30)], 1.0e9, blocks=1)
    placed = place_freely(network, ASKED)[0][-1]
    assert (placed.left_out, placed.first) == ([0], 1)
    with pytest.raises(ConfigurationError, match="are 3 workers, and the network's devices are 2"):
        place(network, replace(ASKED, num_stages=(1, 2)))
