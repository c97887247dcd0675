"""Real DataLoaders over real samplers, dealt by the real dealer."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_sdpipe.data.dealt import DealtBatch, DealtBatches
from lightning_sdpipe.data.shards import refuse_to_deal, why_sharded
from lightning_sdpipe.dealing.dealer import Dealer
from lightning_sdpipe.dealing.leases import Asked, Done, Lease, Segment
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies import Worker
from tests.exchange.threads import together

N = 3


class Noisy(Dataset[Tensor]):
    """Draws from all generators, as an augmentation would."""

    def __init__(self, size: int = 50) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, float(torch.rand(())), random.random(), np.random.rand()])


class Together(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


def masked(samples: list[Tensor]) -> Tensor:
    return torch.cat([torch.stack(samples), torch.rand(len(samples), 1)], dim=1)


class Desk:
    """The dealer, asked by the threads of several pipelines."""

    def __init__(self, pipelines: int, stages: int = 1) -> None:
        self._dealer = Dealer(stages, pipelines)
        self._changed = threading.Condition()
        self.trained: Counter[Worker] = Counter()

    def ask(self, worker: Worker) -> Callable[[Segment, int], Lease]:
        def ask(segment: Segment, ordinal: int, *_: float) -> Lease:
            with self._changed:
                done = Done(self.trained[worker], 1.0 * (1 + worker.pipeline) ** 2)  # a lease is short of a shard
                if self._dealer.answer(worker.pipeline, segment, ordinal) is None:
                    self._dealer.on(Asked(worker, segment, ordinal, done), 0.0)
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._dealer.answer(worker.pipeline, segment, ordinal), 20)
                lease = self._dealer.answer(worker.pipeline, segment, ordinal)
                assert lease is not None
                return lease

        return ask


def sharded(pipeline: int, dataset: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    """A loader as Lightning gives it its sampler."""
    dataset = Noisy() if dataset is None else dataset
    sampler = DistributedSampler(dataset, N, pipeline)
    return DataLoader(dataset, sampler=sampler, **{"batch_size": 4, "collate_fn": masked, **options})


def epoch(
    loaders: list[DataLoader[Any]], pauses: tuple[int, ...] = (), epochs: int = 1, slow: int | None = None
) -> list[list[DealtBatch]]:
    """What each pipeline trains, in threads; all pause together. ``slow`` trains once the others had nothing to."""
    desk = Desk(len(loaders))
    barrier = threading.Barrier(len(loaders))
    trained: list[list[DealtBatch]] = [[] for _ in loaders]
    dealt = [DealtBatches(loader, N, desk.ask(Worker(0, i))) for i, loader in enumerate(loaders)]
    had_nothing = [threading.Event() for _ in loaders]
    alone = threading.Lock()  # the generators belong to the process, and a process to one pipeline

    def train(i: int) -> None:
        length = len(dealt[i].shards)
        for number in range(epochs):
            loaders[i].sampler.set_epoch(number) if hasattr(loaders[i].sampler, "set_epoch") else None
            for start, stop in zip((0, *pauses), (*pauses, length), strict=True):
                desk.trained[Worker(0, i)] = 0
                barrier.wait()
                with alone:
                    dealt[i].begin(Segment(1, number, start, stop), seed=7)
                while True:
                    with alone:
                        batch = dealt[i].take()
                    if batch is not None:
                        for other in range(len(loaders)) if i == slow else ():
                            assert other == slow or had_nothing[other].wait()
                        assert start <= batch.number < stop
                        trained[i].append(batch)
                        desk.trained[Worker(0, i)] += 1
                    else:
                        had_nothing[i].set()
                        if not dealt[i].wait():
                            break

    together(len(loaders), train)
    return trained


def contents(trained: list[list[DealtBatch]]) -> dict[int, Tensor]:
    """By position; each once."""
    batches = [batch for mine in trained for batch in mine]
    assert len({batch.position for batch in batches}) == len(batches)
    return {batch.position: batch.data for batch in batches}


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}, {"drop_last": True}],
    ids=str,
)
def test_each_batch_of_distributed_sampler_is_trained_once_with_the_same_contents(options: dict[str, Any]) -> None:
    """Whoever trains it, and however it is loaded: indices, augmentation and what the collate function draws."""
    loaders = [sharded(i, **options) for i in range(N)]
    before = torch.manual_seed(4).get_state()
    ours = contents(epoch(loaders, pauses=(2,), slow=1 if not options else None))
    assert torch.equal(torch.get_rng_state(), before)
    alone = contents(epoch([sharded(i, drop_last=bool(options.get("drop_last"))) for i in range(N)]))
    assert ours.keys() == alone.keys() == set(range(N * len(loaders[0])))
    assert all(torch.equal(ours[position], alone[position]) for position in ours)
    for home in range(N):
        for number, indices in enumerate(loaders[home].batch_sampler):
            assert ours[number * N + home][:, 0].long().tolist() == indices


def test_epochs_differ_and_a_slow_pipeline_is_helped() -> None:
    trained = epoch([sharded(i, Noisy(200)) for i in range(N)], epochs=1, slow=2)
    # Its first lease is half of its shard at most. It asks for more when pipeline 0, much faster, was told that there
    # is nothing: then one or two batches are left, in whatever order the threads have asked.
    assert len(trained[2]) < len(contents(trained)) // N
    assert any(batch.home == 2 for batch in trained[0] + trained[1])
    two = epoch([sharded(i) for i in range(N)], epochs=2)
    both: dict[int, list[Tensor]] = defaultdict(list)
    for batch in (batch for mine in two for batch in mine):
        both[batch.position].append(batch.data)
    assert all(len(pair) == 2 and not torch.equal(*pair) for pair in both.values())


def test_a_scheduler_that_is_far_away_is_asked_before_a_lease_is_used_up() -> None:
    """An early question is not waited for, and its answer is used when it is due."""
    segment, early, late = Segment(1, 0, 0, 40), [], []
    sizes = [10, 10, 10, 5, 5, 0, 0]
    starts = [sum(sizes[:ordinal]) for ordinal in range(len(sizes))]
    taken = 0

    def ask(segment: Segment, ordinal: int, *seconds: float) -> Lease | None:
        (early if seconds else late).append((ordinal, taken))
        if seconds and ordinal == 2:
            return None  # it has still to come
        if not seconds:
            time.sleep(0.03)
        start, stop = starts[ordinal], starts[ordinal] + sizes[ordinal]
        return Lease(segment, 0, ordinal, 0, start, stop, float(start), 1.0, over=ordinal == 6)

    dataset = Noisy(160)
    sampler = DistributedSampler(dataset, 1, 0)
    dealt = DealtBatches(DataLoader(dataset, sampler=sampler, batch_size=4, collate_fn=masked), 1, ask)
    dealt.begin(segment, seed=7)
    numbers = []
    while (batch := dealt.take()) is not None:
        taken += 1
        numbers.append(batch.number)
    assert numbers == [*range(40)]
    assert not dealt.wait()
    assert late == [(0, 0), (1, 10), (2, 20), (6, 40)], (
        "the first answer that is slow, and the one that has still to come"
    )
    assert [ordinal for ordinal, _ in early] == [2, 2, 3, 4, 5]
    assert early[0] == (2, 18)


class Bucketed(BatchSampler):
    """A batch sampler of the user's, which Lightning gives the distributed sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield sorted(batch)


def test_samplers_and_batch_samplers_of_the_user_are_dealt_by_position() -> None:
    """A sampler that draws gives all pipelines the same shards, although it draws from the process's generators."""
    loaders = []
    for i in range(N):
        torch.manual_seed(100 + i)
        sampler = DistributedSamplerWrapper(WeightedRandomSampler([1.0] * 50, 30), num_replicas=N, rank=i)
        loaders.append(DataLoader(Noisy(), batch_sampler=Bucketed(sampler, 4, False)))
    ours = contents(epoch(loaders))
    again = contents(epoch(loaders[::1]))
    assert all(torch.equal(ours[position], again[position]) for position in ours)
    for batch in ours.values():
        assert batch[:, 0].tolist() == sorted(batch[:, 0].tolist())


def test_loaders_without_batching_and_datasets_that_load_many_at_once() -> None:
    single = [sharded(i, batch_size=None, collate_fn=None) for i in range(N)]
    assert sorted(int(sample[0]) for sample in contents(epoch(single)).values()) == sorted(
        [*range(50), *[int(i) for i in list(DistributedSampler(Noisy(), N, N - 1))[-1:]]]
    )
    many = contents(epoch([sharded(i, Together()) for i in range(N)]))
    one = contents(epoch([sharded(i) for i in range(N)]))
    assert all(torch.equal(many[position], one[position]) for position in one)


def sees_its_own_dataset(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Noisy)


def test_a_worker_starts_with_the_users_dataset() -> None:
    trained = epoch([sharded(i, num_workers=1, worker_init_fn=sees_its_own_dataset) for i in range(N)])
    assert len(contents(trained)) == N * 5


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Endless(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        yield [0]


class Hidden(Sampler[list[int]]):
    """Keeps its sampler where nobody finds it."""

    def __init__(self, sampler: Any) -> None:
        self.inside = [sampler]

    def __iter__(self) -> Iterator[list[int]]:
        return ([index] for index in self.inside[0])

    def __len__(self) -> int:
        return len(self.inside[0])


class Resuming(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Uncopied(BatchSampler):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("it holds a file")


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda: [1, 2], "a list is not a DataLoader"),
        (lambda: DataLoader(Stream()), "an IterableDataset is read in order"),
        (lambda: DataLoader(Noisy(), batch_sampler=Endless()), "the batch sampler Endless has no length"),
        (lambda: DataLoader(Noisy()), "no DistributedSampler was found in BatchSampler"),
        (lambda: DataLoader(Noisy(), batch_sampler=Hidden(DistributedSampler(Noisy(), N, 1))), "found in Hidden"),
        (lambda: sharded(2), "its sampler is that of replica 2 of 3, and this is pipeline 1 of 3"),
        (lambda: sharded(1, Noisy(8), drop_last=True), "a pipeline has no batch in an epoch"),
        (lambda: sharded(1, num_workers=1, in_order=False), "in an order that is not known"),
        (lambda: Resuming(Noisy(), sampler=DistributedSampler(Noisy(), N, 1)), "decides by itself"),
        (
            lambda: DataLoader(Noisy(), batch_sampler=Uncopied(DistributedSampler(Noisy(), N, 1), 2, False)),
            "cannot be copied for the other shards (TypeError: it holds a file)",
        ),
    ],
)
def test_what_cannot_be_dealt_says_why(loader: Callable[[], Any], reason: str) -> None:
    why = why_sharded(loader(), 1, N)
    assert why is not None
    assert reason in why
    with pytest.raises(ConfigurationError, match=r"data='dealt' was given, but .*Or pass data='sharded'"):
        raise refuse_to_deal(why)


def test_what_can_be_dealt_has_no_objection() -> None:
    assert why_sharded(sharded(1), 1, N) is None
    assert why_sharded(sharded(1, batch_size=None, collate_fn=None), 1, N) is None


class Short(BatchSampler):
    def __len__(self) -> int:
        return 100


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch
            yield batch


def test_loaders_whose_length_is_wrong_are_refused() -> None:
    desk = Desk(1)
    short = DataLoader(Noisy(), batch_sampler=Short(DistributedSampler(Noisy(), 1, 0), 5, False))
    with pytest.raises(
        ConfigurationError, match=re.escape("gave 10 batches for the shard of pipeline 0, and its length")
    ):
        DealtBatches(short, 1, desk.ask(Worker(0, 0))).begin(Segment(1, 0, 0, 10), 0)
    doubling = Doubling(Noisy(), 5, sampler=DistributedSampler(Noisy(), 1, 0))
    dealt = DealtBatches(doubling, 1, desk.ask(Worker(0, 0)))
    dealt.begin(Segment(1, 0, 0, 10), 0)
    assert dealt.take() is not None
    with pytest.raises(ConfigurationError, match="Doubling gave more batches than its sampler"):
        dealt.take()
