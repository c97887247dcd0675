"""Which micro-batches each pipeline trains of a batch that all train together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_sdpipe.data.joint import PlacedBatches
from lightning_sdpipe.dealing.joint_rounds import PartKey


class Drawing(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_loaded_does_not_depend_on_who_loads_it(workers: int) -> None:
    """What was decided before the loader was asked holds, however far it looks ahead; draws belong to micro-batches."""

    def loaded(counts: dict[int, list[int]], start: int = 0) -> dict[tuple[int, int], Any]:
        found = {}
        for pipeline in range(2):
            sampler: Any = DistributedSampler(Drawing(), 2, pipeline, drop_last=True)
            loader = DataLoader(Drawing(), 4, sampler=sampler, num_workers=workers)
            batches = PlacedBatches(loader, 2, 2)
            batches.begin(3, 7)

            def mine(number: int, pipeline: int = pipeline) -> list[PartKey]:
                places, first = [(home, number, part) for home in range(2) for part in range(2)], counts[number][0]
                return places[first:] if pipeline else places[:first]

            for number in range(start, 3):
                data, portion = batches.take(mine(number), map(mine, range(number + 1, len(batches))))
                for place, samples in zip(portion.places, data.split(portion.sizes), strict=True):
                    found[place] = samples.tolist()
            batches.close()
            assert [batches.samples(number) for number in range(3)] == [4, 4, 3]
        return found

    equal = loaded({0: [2, 2], 1: [2, 2], 2: [2, 2]})
    assert len(equal) == 12
    assert len({tuple(sample) for samples in equal.values() for sample in samples}) == 22
    assert loaded({0: [2, 2], 1: [3, 1], 2: [1, 3]}) == equal
    assert loaded({1: [1, 3], 2: [3, 1]}, start=1) == {place: equal[place] for place in equal if place[0] >= 2}


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_put_together_of_what_is_asked_for_also_if_that_was_not_foreseen(workers: int) -> None:
    loader = DataLoader(
        Drawing(),
        4,
        sampler=DistributedSampler(Drawing(), 2, 0, shuffle=False),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    placed = PlacedBatches(loader, 2, 2)
    placed.begin(0, seed=5)
    asked: list[list[PartKey]] = [[(0, 0, 0), (1, 0, 1)], [(0, 1, 0)], [(1, 0, 0), (1, 1, 0)], [(0, 0, 0), (1, 0, 1)]]
    found = [placed.take(asked[0], iter([asked[1], [(0, 2, 0)]]))]
    found += [placed.take(places, iter(())) for places in asked[1:]]
    placed.close()
    for places, (data, portion) in zip(asked, found, strict=True):
        assert portion.places == tuple((2 * number + home, part) for home, number, part in places)
        assert portion.sizes == (2,) * len(places)
        assert portion.share == 1
        expected = [home + 2 * (4 * number + 2 * part + k) for home, number, part in places for k in range(2)]
        assert data[:, 0].tolist() == expected
    assert torch.equal(found[0][0], found[3][0]), "draws belong to micro-batches"
