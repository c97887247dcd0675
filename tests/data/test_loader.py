"""Which random numbers belong to which batch of a loader, and that shards of what is drawn do not overlap."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.data import _update_dataloader
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    default_collate,
)

from lightning_sdpipe.data.dealt import DealtBatches
from lightning_sdpipe.data.loader import PipelineLoader
from lightning_sdpipe.dealing.leases import Lease, Segment
from lightning_sdpipe.errors import ConfigurationError

N, SIZE, BATCH = 3, 48, 4
SEED = (7, 2)  # of the run, and the epoch


def drawn() -> list[float]:
    return [float(torch.rand(())), random.random(), np.random.rand(), np.random.standard_normal()]


class Noisy(Dataset[Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, *drawn()])


class Own(Sampler[int]):
    """A sampler of the user's, which Lightning deals out over the pipelines."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.shuffle(order)
        return iter(np.random.permutation(order)[torch.randperm(SIZE).numpy()].tolist())


class Lazy(Sampler[int]):
    """A distributed sampler of the user's own, which draws from all generators whenever it is asked."""

    def __init__(self, pipeline: int) -> None:
        self.pipeline = pipeline

    def __iter__(self) -> Iterator[int]:
        for position, index in enumerate(shuffled(range(SIZE))):
            if position % N == self.pipeline:
                yield index

    def __len__(self) -> int:
        return SIZE // N


def shuffled(numbers: Any, held: int = 7) -> Iterator[int]:
    """By a buffer, as a stream is."""
    buffer: list[int] = []
    for number in numbers:
        buffer.append(number)
        if len(buffer) == held:
            yield buffer.pop(int(sum(drawn()[:3]) * 1000) % held)
    yield from buffer


class Stream(IterableDataset[Tensor]):
    def __init__(self, pipeline: int) -> None:
        self.pipeline = pipeline

    def __iter__(self) -> Iterator[Tensor]:
        for index in list(shuffled(torch.randperm(SIZE).tolist()))[self.pipeline :: N]:
            yield torch.tensor([index, *drawn()])


class LazyStream(Stream):
    """Every pipeline draws for all samples, at other points between its batches."""

    def __iter__(self) -> Iterator[Tensor]:
        for position, index in enumerate(shuffled(torch.randperm(SIZE).tolist())):
            sample = torch.tensor([index, *drawn()])
            if position % N == self.pipeline:
                yield sample


class Shuffling:
    """No DataLoader at all."""

    def __init__(self, pipeline: int) -> None:
        self.pipeline = pipeline

    def __iter__(self) -> Iterator[Tensor]:
        mine = list(shuffled(np.random.permutation(SIZE).tolist()))[self.pipeline :: N]
        for start in range(0, len(mine), BATCH):
            yield torch.tensor([[index, *drawn()] for index in mine[start : start + BATCH]])


class ByHand(DataLoader[Any]):
    """Asks its data set by itself."""

    def __iter__(self) -> Any:
        mine = torch.randperm(len(self.dataset)).tolist()[self.sampler.rank :: N]
        for start in range(0, len(mine), BATCH):
            yield torch.stack([self.dataset[index] for index in mine[start : start + BATCH]])


def masked(samples: list[Tensor]) -> Tensor:
    noise = torch.tensor([drawn() for _ in range(random.randrange(1, 4))])
    return torch.cat([default_collate(samples), noise.mean(0).expand(len(samples), -1)], dim=1)


def loader(kind: str, pipeline: int, **options: Any) -> Any:
    options = {"collate_fn": masked, **options}
    data, place = Noisy(), {"num_replicas": N, "rank": pipeline}
    if kind == "shuffled":
        return DataLoader(data, BATCH, sampler=DistributedSampler(data, **place), **options)
    if kind == "own":
        return DataLoader(data, BATCH, sampler=DistributedSamplerWrapper(Own(), **place), **options)
    if kind == "random":
        sampler = DistributedSamplerWrapper(RandomSampler(data), **place)
        return DataLoader(data, BATCH, sampler=sampler, **options)
    if kind == "lazy":
        return DataLoader(data, BATCH, sampler=Lazy(pipeline), **options)
    if kind in ("stream", "lazy stream"):
        return DataLoader(Stream(pipeline) if kind == "stream" else LazyStream(pipeline), BATCH, **options)
    if kind == "by hand":
        return ByHand(data, BATCH, sampler=DistributedSampler(data, **place), **options)
    return Shuffling(pipeline)


def batches(
    kind: str, pipeline: int, epochs: tuple[tuple[int, ...], ...] = (SEED,), disturb: int = 1, **options: Any
) -> list[list[Tensor]]:
    """Of each epoch. ``disturb``: so many numbers a model draws between batches."""
    torch.manual_seed(disturb)  # as another process would have
    random.seed(disturb)
    np.random.seed(disturb)
    seeds = iter(epochs)
    pipelines_loader = PipelineLoader(loader(kind, pipeline, **options), pipeline, N, lambda: next(seeds))
    found: list[list[Tensor]] = []
    for _ in epochs:
        found.append([])
        for batch in pipelines_loader:
            found[-1].append(batch)
            for _ in range(disturb):
                drawn()
    return found


KINDS = ["shuffled", "own", "random", "lazy", "stream", "lazy stream", "by hand", "no loader"]


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_what_is_drawn_do_not_overlap(kind: str) -> None:
    epochs = (SEED, (7, 3), (7, 3))  # of which one is repeated
    pipelines = [batches(kind, pipeline, epochs, disturb=pipeline) for pipeline in range(N)]
    orders = []
    for epoch in range(len(epochs)):
        trained = [index for each in pipelines for batch in each[epoch] for index in batch[:, 0].tolist()]
        assert Counter(trained) == dict.fromkeys(range(SIZE), 1)
        orders.append(trained)
    if kind != "shuffled":  # whose order a DistributedSampler draws by its epoch
        assert orders[0] != orders[1] != orders[2], "each epoch is drawn anew"


@pytest.mark.parametrize("kind", KINDS)
def test_stages_that_draw_differently_get_equal_batches(kind: str) -> None:
    ((ours, again), (theirs, _)) = (batches(kind, 1, (SEED, SEED), disturb=disturb) for disturb in (1, 5))
    assert len(ours) == SIZE // N // BATCH
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    noise = [row for epoch in (ours, again) for batch in epoch for row in batch[:, 1:].tolist()]
    assert len({tuple(row) for row in noise}) == len(noise), "what is drawn is not drawn again"


@pytest.mark.parametrize("kind", ["shuffled", "own", "stream"])
def test_batches_of_pipelines_draw_different_numbers(kind: str) -> None:
    columns = slice(5, None) if kind == "stream" else slice(1, None)  # those of its collate function
    noise = [batches(kind, pipeline)[0][0][:, columns] for pipeline in range(N)]
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[1], noise[2])


@pytest.mark.parametrize("kind", ["own", "lazy"])
def test_batches_do_not_depend_on_the_process_that_loads_them(kind: str) -> None:
    alone, by_workers = batches(kind, 1), batches(kind, 1, disturb=3, num_workers=2)
    assert all(torch.equal(a, b) for a, b in zip(alone[0], by_workers[0], strict=True))


def test_workers_of_a_stream_draw_alike_in_all_pipelines_and_stages() -> None:
    first, second = (batches("stream", 1, (SEED, (7, 3)), disturb, num_workers=2) for disturb in (1, 4))
    assert all(torch.equal(a, b) for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True))
    orders = [[batch[:, 0].tolist() for batch in batches("stream", i, num_workers=1)[0]] for i in range(N)]
    assert Counter(index for order in orders for batch in order for index in batch) == dict.fromkeys(range(SIZE), 1)


@pytest.mark.parametrize("kind", ["shuffled", "own", "random"])
def test_a_dealt_batch_is_the_one_that_its_shard_has(kind: str) -> None:
    def ask(segment: Segment, ordinal: int, *seconds: float) -> Lease | None:
        assert ordinal < len(leases) or seconds == (0.0,), "only an early question may come to nothing"
        return leases[ordinal] if ordinal < len(leases) else None

    segment, length = Segment(1, SEED[1], 0, SIZE // N // BATCH), SIZE // N // BATCH
    leases = [Lease(segment, 1, ordinal, home, 0, length, 0.0, N) for ordinal, home in enumerate((1, 0, 2))]
    dealt = DealtBatches(loader(kind, 1), N, ask)
    dealt.begin(segment, SEED[0])
    for home in (1, 0, 2):
        for expected in batches(kind, home)[0]:
            batch = dealt.take()
            assert batch is not None
            assert torch.equal(batch.data, expected)


def test_what_is_drawn_while_fetching_does_not_matter_afterwards() -> None:
    def drawn_after(collate: Any) -> Tensor:
        torch.manual_seed(1)
        plain = loader("shuffled", 0, collate_fn=collate)
        pipelines_loader = PipelineLoader(plain, 0, N, lambda: SEED)
        assert pipelines_loader.batch_size == BATCH
        assert pipelines_loader.dataset is plain.dataset
        draws = [torch.tensor(drawn()) for _ in pipelines_loader]
        assert not torch.equal(draws[0], draws[1])
        return torch.stack(draws)

    assert torch.equal(drawn_after(masked), drawn_after(None))


def test_workers_that_outlive_an_epoch_end_where_lightning_ends_them() -> None:
    plain = loader("shuffled", 0, num_workers=1, persistent_workers=True)
    pipelines_loader = PipelineLoader(plain, 0, N, lambda: SEED)
    list(pipelines_loader)
    first = pipelines_loader._iterator
    list(pipelines_loader)
    assert pipelines_loader._iterator is first is not None
    first._shutdown_workers()
    pipelines_loader._iterator = None
    assert len(list(pipelines_loader)) == len(pipelines_loader)


@pytest.mark.parametrize("lost", [True, False])
def test_batches_that_lightning_loses_are_refused(lost: bool) -> None:
    """Of bare tensors, a sample would be taken for a batch."""
    data: Any = torch.arange(24.0).view(6, 4)
    given = DataLoader(data, batch_sampler=BatchSampler(range(6), 2, False)) if lost else DataLoader(data, 2)
    loader = _update_dataloader(given, DistributedSampler(data, num_replicas=1, rank=0))
    if lost:
        with pytest.raises(ConfigurationError, match="gives single samples to a collate function"):
            PipelineLoader(loader, 0, 1, lambda: SEED)
    else:
        assert next(iter(PipelineLoader(loader, 0, 1, lambda: SEED))).shape == (2, 4)


class Resuming(DataLoader[Any]):
    """Goes on where its state says, as Lightning's checkpoints of the middle of an epoch have it."""

    given = skipped = 0

    def __iter__(self) -> Any:
        skipped, self.skipped = self.skipped, 0
        for self.given, batch in enumerate(super().__iter__(), start=1):
            if self.given > skipped:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["given"]


@pytest.mark.parametrize("data", [Noisy(), Stream(1)], ids=["map", "iterable"])
def test_a_loader_that_keeps_its_place_resumes_there(data: Any) -> None:
    def wrapped() -> PipelineLoader:
        return PipelineLoader(Resuming(data, BATCH), 1, N, lambda: SEED)

    loader, resumed = wrapped(), wrapped()
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    assert loader.state_dict() == {"given": 2}
    resumed.load_state_dict(loader.state_dict())
    torch.testing.assert_close(list(resumed), list(batches))
    assert not isinstance(PipelineLoader(DataLoader(data), 1, N, lambda: SEED), Stateful)


class Scheduled(DataLoader[Any]):
    """Keeps state that hooks set and read."""

    epoch, begun = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        self.begun += 1
        for batch in super().__iter__():
            yield batch + 100 * self.epoch


def test_hooks_and_the_loader_see_each_others_state() -> None:
    plain = Scheduled(torch.arange(4), BATCH)
    pipelines_loader: Any = PipelineLoader(plain, 0, 1, lambda: SEED)
    assert next(iter(pipelines_loader))[0] == 0
    pipelines_loader.set_epoch(2)
    pipelines_loader.of_the_user = "kept"
    first, *_ = pipelines_loader
    assert first[0] == 200
    assert (plain.begun, pipelines_loader.begun, plain.of_the_user) == (2, 2, "kept")
    plain.collate_fn = lambda samples: torch.stack(samples) * -1
    first, *_ = pipelines_loader
    assert first.sum() < 200 * BATCH
    assert plain.begun == 3


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_a_generator_of_the_users_own_draws_the_order_of_one_process(options: dict[str, Any]) -> None:
    plain, other = (
        DataLoader(range(SIZE), BATCH, shuffle=True, generator=torch.Generator().manual_seed(1), **options)  # type: ignore[arg-type]
        for _ in range(2)
    )
    ours = PipelineLoader(other, 0, 1, lambda: SEED)
    for _ in range(3):
        assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in plain]


@pytest.mark.parametrize("done", [2, 100])  # the second: a shard that is shorter than others keeps its last batch
def test_what_is_done_is_left_out_once_and_the_rest_draws_as_ever(done: int) -> None:
    whole, rest = (PipelineLoader(loader("own", 1), 1, N, lambda: SEED) for _ in range(2))
    every = list(whole)
    assert rest.skips
    rest.skip(done)
    assert torch.equal(torch.cat(list(rest)), torch.cat(every[min(done, len(every) - 1) :]))
    assert torch.equal(torch.cat(list(rest)), torch.cat(list(whole)))


@pytest.mark.parametrize("kind", ["stateful", "lazy stream", "by hand", "no loader"])
def test_other_loaders_leave_out_nothing(kind: str) -> None:
    given = Resuming(Noisy(), BATCH) if kind == "stateful" else loader(kind, 1)
    assert not PipelineLoader(given, 1, N, lambda: SEED).skips


class TooMany(Noisy):
    def __getitem__(self, index: int) -> Tensor:
        raise RuntimeError("received 0 items of ancdata")  # torch's words


def test_too_few_file_descriptors_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"no more than \d+ files, .* Raise the limit \(`ulimit -n \d+`\)"):
        list(PipelineLoader(DataLoader(TooMany(), BATCH), 1, N, lambda: SEED))
