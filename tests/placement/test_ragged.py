"""Pipelines of unlike depths: the search against all splits of small fleets, and what it finds for known ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement import fleet as fleets
from lightning_sdpipe.placement.fleet import Fleet
from lightning_sdpipe.placement.network import Device, Network
from lightning_sdpipe.placement.planner import PlacementTask
from lightning_sdpipe.placement.ragged import RaggedResult, best_rectangle, place_ragged
from lightning_sdpipe.placement.splits import most_of_all
from lightning_sdpipe.placement.throughput import CutJob, Sync
from tests.placement.fleets import FLEETS, MICRO_BATCHES, Devices, fleet

ASKED = PlacementTask(1, num_micro_batches=MICRO_BATCHES)

TABLE = {
    "1 at 1 (48) + 4 at 1/2 (24)": (1.99, 2.76, 1.39, 0.92, [1, 2, 2]),
    "H100 + 8 at 1/4 (24)": (1.99, 2.77, 1.39, 0.92, [1, 2, 2, 2, 2]),
    "A6000 + 2 3090 + 2 4060 Ti": (1.34, 1.73, 1.29, 0.92, [1, 2, 2]),
    "5090 + 4090 + 3090": (1.71, 2.03, 1.19, 0.92, [1, 2]),
    "5 equal (24)": (3.49, 4.02, 1.15, 0.80, [2, 3]),
    "2 A100 + 2 3090 + 2 V100": (3.28, 3.54, 1.08, 0.95, [1, 1, 2, 2]),
    "2 at 1 (80) + 4 at 1/2 (24)": (3.51, 3.76, 1.07, 0.94, [1, 1, 2, 2]),
    "5090 + 4060 Ti": (1.06, 1.06, 1.00, 0.87, [2]),
}
"""Mini-batches a second of the best rectangle and of the best pipelines, their ratio, the share of the sum of speeds,
and the depths."""


@pytest.mark.parametrize("name", TABLE)
def test_known_fleets(name: str) -> None:
    network, (rectangle, ragged, ratio, share, depths) = FLEETS[name], TABLE[name]
    found, alike = place_ragged(network, ASKED), best_rectangle(network, ASKED)
    assert alike is not None
    assert alike.alike
    assert (alike.rate, found.rate) == pytest.approx((rectangle, ragged), abs=0.006)
    assert found.rate / alike.rate == pytest.approx(ratio, abs=0.006)
    assert found.rate / sum(device.speed for device in network.devices) == pytest.approx(share, abs=0.006)
    assert 0.85 < found.rate / found.bound <= 1
    assert sorted(found.depths) == depths
    assert found.left_out == []
    assert found.exact


def random_fleet(seed: int, most: int = 6) -> Network:
    """With memory for a third of the model to all of it, and a cut that costs next to nothing or a lot."""
    rng = random.Random(seed)
    classes, left = [], most
    while left:
        count = rng.randint(1, min(left, 3))
        classes.append(Devices(f"host{len(classes)}", count, rng.choice((0.2, 0.5, 0.7, 1.0)), rng.uniform(6, 24)))
        left -= count
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


def brute_force(network: Network, sync: Sync, members: int | None = None, depths: Sequence[int] = ()) -> float:
    """By every split of the devices and every order of each pipeline, cut so that its slowest stage is fastest."""
    every = Fleet(network, replace(ASKED, sync=sync), MICRO_BATCHES, len(network))
    known: dict[tuple[tuple[int, ...], int], float] = {}

    def best(part: list[int], k: int) -> float:
        key = tuple(sorted(part)), k
        if key not in known:
            rows = [row for order in permutations(part) if (row := every.row(order)) is not None]
            known[key] = max((every.rate_of(row, k) for row in rows), default=0.0)
        return known[key]

    most = 0.0
    for split in every_split(range(len(network))):
        if depths and sorted(map(len, split)) != sorted(depths):
            continue
        rates = [best(part, members or every.members(len(split))) for part in split]
        if rates and min(rates):
            most = max(most, len(rates) * min(rates) if sync == "all_reduce" else sum(rates))
    return most


@pytest.mark.parametrize("seed", range(12))
def test_f_is_what_all_splits_of_six_devices_make(seed: int) -> None:
    network = random_fleet(seed)
    expected = brute_force(network, "groups", members=4)
    made, split = most_of_all(Fleet(network, ASKED, MICRO_BATCHES, 6), 4)
    assert made == pytest.approx(expected)
    assert bool(split) == bool(expected)
    if expected:
        found = with_any_first(network, ASKED, ())
        assert isinstance(found, RaggedResult)
        assert found.rate + found.price >= expected * (1 - 1e-9)  # averaging with fewer is quicker
        assert found.rate <= found.bound * (1 + 1e-9)


def with_any_first(network: Network, asked: PlacementTask, depths: Sequence[int]) -> RaggedResult | list[str]:
    """The messages, if none of the devices may be rank 0."""
    messages = []
    for first in range(len(network)):
        try:
            return place_ragged(network, replace(asked, first=first), depths)
        except ConfigurationError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("seed", range(6))
def test_all_reduce_and_given_depths_find_the_best_of_all_splits(seed: int) -> None:
    network = random_fleet(seed, 5)
    for sync in ("groups", "all_reduce"):
        asked: PlacementTask = replace(ASKED, sync=sync)
        for depths in ((), (1, 2, 2), (2, 3)):
            expected = brute_force(network, asked.sync, depths=depths)
            outcome = with_any_first(network, asked, depths)
            if isinstance(outcome, list):
                assert expected == 0
                assert all("in no such pipelines" in message for message in outcome)
            else:
                assert sorted(outcome.depths) == sorted(depths or outcome.depths)
                assert outcome.rate + outcome.price == pytest.approx(expected)


def test_annealing_comes_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "EXACT", 0)
    for name in ("1 at 1 (48) + 4 at 1/2 (24)", "A6000 + 2 3090 + 2 4060 Ti", "5 equal (24)"):
        found = place_ragged(FLEETS[name], ASKED)
        assert not found.exact
        assert found.rate >= 0.97 * TABLE[name][1]
        assert found.rate <= found.bound
    found = place_ragged(FLEETS["1 at 1 (48) + 4 at 1/2 (24)"], ASKED, (2, 2, 1))
    assert found.rate >= 0.97 * 2.76


def test_with_no_number_of_micro_batches_there_are_as_many_as_the_deepest_has_stages() -> None:
    found = place_ragged(FLEETS["5 equal (24)"], replace(ASKED, num_micro_batches=None))
    assert found.asked.micro_batches == max(found.depths)
    given = place_ragged(FLEETS["5 equal (24)"], replace(ASKED, num_micro_batches=None), (2, 3))
    assert given.asked.micro_batches == 3


def test_rank_zero_runs_a_last_stage() -> None:
    network = FLEETS["5090 + 4090 + 3090"]  # one alone, and the others together
    for first in range(3):
        found = place_ragged(network, replace(ASKED, first=first))
        assert found.rows[0].devices[-1] == first == found.asked.first
        assert sorted(device for row in found.rows for device in row.devices) == [0, 1, 2]
        assert found.rate + found.price == pytest.approx(2.034, abs=0.001)


def test_a_device_that_is_left_out_cannot_be_rank_zero() -> None:
    network = fleet([Devices("small", 1, 0.5, 2), Devices("large", 1, 1.0, 30)], 1.0e9, blocks=1)
    found = place_ragged(network, ASKED)
    assert (found.left_out, found.asked.first) == ([0], 1)
    with pytest.raises(ConfigurationError, match="are 3 workers, and the network has 2 devices"):
        place_ragged(network, ASKED, (1, 2))


def test_devices_of_one_host_that_are_about_equally_fast_are_one_class() -> None:
    network = fleet([Devices("a", 3, 1.0, 30), Devices("b", 1, 1.0, 30)], 1.0e9)
    devices = [replace_speed(device, 1.0 - 0.03 * device.index) for device in network.devices]
    classes = Fleet(replace(network, devices=tuple(devices)), ASKED, 8, 4).classes
    assert sorted(map(len, classes)) == [1, 1, 2]


def replace_speed(device: Device, speed: float) -> Device:
    return type(device)(device.host, device.index, speed, device.memory_bytes)


def test_averaging_counts_the_largest_worker() -> None:
    """A pipeline of one stage moves the whole model, one of two half of it."""
    network = replace(FLEETS["1 at 1 (48) + 4 at 1/2 (24)"], bandwidth_bytes_per_second=[[1e9] * 5] * 5)
    every = Fleet(network, ASKED, MICRO_BATCHES, 5)
    alone, pair = every.row((0,)), every.row((1, 2))
    assert alone is not None
    assert pair is not None
    cut = CutJob(fleets.job_of(network, replace(ASKED, num_stages=1)), alone.spans)
    assert alone.seconds == pytest.approx(cut.pipeline_seconds((0,)))
    for row, share in ((alone, 1.0), (pair, 0.5)):
        averaging = 1 / every.rate_of(row, 4) - row.seconds
        assert averaging == pytest.approx(2 * 3 / 4 * share * 4 * 2.0e9 / 1e9, rel=1e-3)
        assert every.rate_of(row, 1) == 1 / row.seconds
