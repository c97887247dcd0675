from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_sdpipe.partition.sample import copied, last_batch_size, sample_batch

DATA = TensorDataset(torch.arange(10.0))


def test_the_first_samples_are_taken_and_no_random_number_is_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(DATA, 4, shuffle=True, generator=generator)
    states = torch.get_rng_state(), generator.get_state()
    (batch,) = sample_batch(loader)
    assert batch.tolist() == [0, 1, 2, 3]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])


def test_a_structure_of_loaders_gives_a_structure_of_batches() -> None:
    batch = sample_batch({"a": DataLoader(DATA, 2), "b": [DataLoader(DATA, 20)]})
    assert [t.shape for t in (batch["a"][0], batch["b"][0][0])] == [(2,), (10,)]


@pytest.mark.parametrize(
    ("size", "options", "shares", "last"),
    [(4, {}, 1, 2), (5, {}, 1, 5), (4, {}, 2, 1), (4, {"drop_last": True}, 1, None), (20, {}, 1, 10)],
)
def test_the_size_of_the_last_batch_is_known(size: int, options: Any, shares: int, last: int | None) -> None:
    assert last_batch_size(DataLoader(DATA, size, **options), shares) == last


def test_the_size_of_the_last_batch_of_a_shard_or_a_stream() -> None:
    assert last_batch_size(DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 0)), 2) == 1
    assert last_batch_size(DataLoader(Stream(), 2), 1) is None
    assert last_batch_size(DataLoader(DATA, batch_sampler=BatchSampler(range(3), 2, False)), 1) == 1
    assert last_batch_size(DataLoader(DATA, 2, sampler=iter(range(3))), 1) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", ["own", "shared with another process", "an array's"])
def test_a_copy_is_not_changed_with_its_batch(kept: str) -> None:
    tensor = torch.from_numpy(torch.ones(4).numpy()) if kept == "an array's" else torch.ones(4)
    batch = {"x": tensor.share_memory_() if kept == "shared with another process" else tensor}
    other = copied(batch)
    batch["x"].add_(1)
    assert other["x"].tolist() == [1.0] * 4


class Stream(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return iter([1.0, 2.0, 3.0])


def test_a_stream_is_iterated() -> None:
    assert sample_batch(DataLoader(Stream(), 2)).tolist() == [1, 2]
    assert sample_batch([torch.zeros(3)])[0].shape == ()


class Open:
    """A loader that holds what cannot be copied."""

    def __init__(self) -> None:
        self.values = (number for number in range(3))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((2,), value) for value in self.values)


def test_a_loader_that_is_not_used_again_need_not_be_copied() -> None:
    loader = Open()
    with pytest.raises(TypeError, match="cannot pickle 'generator'"):
        sample_batch(loader)
    assert sample_batch(loader, keep=False).tolist() == [0, 0]
    assert sample_batch(DataLoader(Stream(), 2, num_workers=1), keep=False).tolist() == [1, 2]


def test_a_data_set_that_gives_whole_batches_is_asked_for_one() -> None:
    class Whole(TensorDataset):
        def __getitems__(self, indices: list[int]) -> torch.Tensor:
            return self.tensors[0][indices]

    loader = DataLoader(Whole(torch.arange(10.0)), 4, collate_fn=lambda batch: batch)
    assert torch.equal(sample_batch(loader), next(iter(loader)))
