"""Unlike data of pipelines are found when training begins, and what differs from itself is not taken for them."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

from lightning_sdpipe import SDPipeStrategy, random_streams
from lightning_sdpipe.data import same_samples
from lightning_sdpipe.data.same_samples import unlike_samples
from lightning_sdpipe.sync import AllReduce
from tests.features.running import Regression, on_four_ranks, pipelines, samples
from tests.workers import run_workers

SIZE = 40


class Rows(Dataset[Any]):
    """Counts how often it is read, and draws what ``beside`` does."""

    def __init__(self, beside: Callable[[], Any] = lambda: None, size: int = SIZE) -> None:
        self.beside, self.size, self.read = beside, size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return {"x": torch.full((3,), float(index)), "name": f"row {index}", "beside": self.beside()}


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(4))


class Fails(Rows):
    def __getitem__(self, index: int) -> Any:
        raise KeyError(index)


def shuffled(rank: int) -> Any:
    return Subset(
        TensorDataset(torch.arange(SIZE)), torch.randperm(SIZE, generator=torch.Generator().manual_seed(rank)).tolist()
    )


def labels(rank: int) -> Any:
    numbers = {name: number for number, name in enumerate(["cat", "dog"] if rank else ["dog", "cat"])}
    return [(np.ones(2), numbers["dog" if index % 3 else "cat"]) for index in range(SIZE)]


def own_draws(rank: int) -> Any:
    own = random.Random(rank)
    return Rows(own.random)


ALIKE: dict[str, Callable[[int], Any]] = {
    "same": lambda rank: Rows(),
    "augmented": lambda rank: Rows(lambda: (torch.rand(2), np.random.rand(), random.random())),
    "augmented by each rank": own_draws,
    "not to be read": lambda rank: Fails(),
    "stream": lambda rank: Stream(),
    "empty": lambda rank: Rows(size=0),
    "tensors": lambda rank: TensorDataset(torch.arange(SIZE), torch.ones(SIZE, 2)),
    "no tensors": lambda rank: TensorDataset(torch.empty(0)),
}
UNLIKE: dict[str, tuple[Callable[[int], Any], str]] = {
    "random_split": (shuffled, "sample 0 on rank 1 differs from that on rank 0"),
    "order of a set": (labels, "sample 0 on rank 1"),
    "of one tensor each": (lambda rank: TensorDataset(torch.full((SIZE,), rank)), "sample 0 on rank 1"),
    "subset of a list": (lambda rank: Subset([rank] * SIZE, range(SIZE)), "sample 0 on rank 1"),  # type: ignore[arg-type]
    "sharded by rank": (lambda rank: Subset(Rows(), range(rank, SIZE, 2)), "sample 0 on rank 1"),
    "sizes": (lambda rank: Rows(size=SIZE + rank), "the size on rank 1"),
    "strings": (lambda rank: [f"{rank} {index // 30}" for index in range(SIZE)], "sample 0 on rank 1"),
}


def _compared(rank: int) -> dict[str, str | None]:
    world = dist.group.WORLD
    assert world is not None
    found = {}
    for name, made in {**ALIKE, **{name: made for name, (made, _) in UNLIKE.items()}}.items():
        data = made(rank)
        loader = DataLoader(
            data, 2, sampler=None if name == "stream" or not len(data) else DistributedSampler(data, 2, rank)
        )
        before, torch_state = random_streams.states(), torch.get_rng_state()
        with mock.patch.object(same_samples, "apart", wraps=same_samples.apart) as child:
            found[name] = unlike_samples(loader, 2, world)
        assert not child.called or "tensor" not in name, "nothing of the user's runs"
        after = random_streams.states()
        assert torch.equal(torch_state, torch.get_rng_state())
        assert before[1] == after[1]
        assert str(before[2]) == str(after[2])
        assert getattr(data, "read", 0) == 0, "but in a child"
    loader = DataLoader(shuffled(rank), 2, shuffle=True)  # use_distributed_sampler=False: what each rank has is its own
    found["of each rank's own"] = unlike_samples(loader, 2, world)
    return found


@pytest.mark.distributed
def test_unlike_data_are_named_and_others_are_not() -> None:
    found, others = run_workers(2, _compared)
    assert found == others
    for name in [*ALIKE, "of each rank's own"]:
        assert found[name] is None, name
    for name, (_, message) in UNLIKE.items():
        assert message in (found[name] or ""), name


def _train(directory: Path) -> tuple[list[str], int]:
    unseeded = torch.utils.data.random_split(samples(), [24, 8], torch.Generator().manual_seed(os.getpid()))[0]
    trainer = pipelines(directory, SDPipeStrategy(1, AllReduce()), max_epochs=1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(Regression(), DataLoader(unseeded, 4))
    return [str(each.message) for each in found if "different training data" in str(each.message)], trainer.global_step


@pytest.mark.distributed
def test_a_run_warns_once_and_goes_on(tmp_path: Path) -> None:
    (warned, steps), (elsewhere, _) = on_four_ranks(_train, tmp_path, count=2)
    assert len(warned) == 1
    assert not elsewhere
    assert "on rank 1 differs from that on rank 0" in warned[0]
    assert steps == 3
