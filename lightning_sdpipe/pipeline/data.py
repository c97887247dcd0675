"""The same batches on every stage of a pipeline, random augmentation and masking included.

The sampler gives the stages of a pipeline the same samples. What a dataset or a collate function draws at random must
be equal too: the first stage needs the masked words and the last one the labels that belong to them. So every batch is
fetched with random numbers from a stream of its own, which all stages of a pipeline share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.groups import ProcessGroups
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.pipeline.samples import tensors_in
from lightning_sdpipe.random_streams import RandomStreams

_STREAMS = RandomStreams(torch.device("cpu"))
_FETCHING = -1  # in the place of a block's number


class PipelineLoader:
    """A data loader whose random draws come from a seed of the pipeline.

    Args:
        loader: any iterable of batches; its other attributes stay reachable.
        pipeline: seeds the loader's workers, instead of the rank by which Lightning would seed them.
        seed: non-negative integers that are equal on all stages of the pipeline, and differ between pipelines and
            epochs.
    """

    def __init__(self, loader: Iterable[Any], pipeline: int, seed: Callable[[], tuple[int, ...]]) -> None:
        self._loader = loader
        self._seed = seed
        self._last: tuple[int, ...] = ()
        self._repetition = 0
        self._longest: int | None = None
        self.even: bool | None = None
        """Do all pipelines get equally many batches for certain? Known after :meth:`compare`."""
        init = getattr(loader, "worker_init_fn", None)
        if isinstance(init, partial) and init.func is pl_worker_init_function:
            loader.worker_init_fn = partial(pl_worker_init_function, rank=pipeline)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def compare(self, groups: ProcessGroups, device: torch.device) -> None:
        """Makes the length that of the longest loader of all pipelines. Every rank must call it."""
        mine = sized_len(self._loader)
        trusted = isinstance(self._loader, DataLoader) and not isinstance(self._loader.dataset, IterableDataset)
        unknown = 2**62
        lengths = torch.tensor([unknown, -unknown, 1] if mine is None else [mine, -mine, int(not trusted)])
        lengths = lengths.to(device)
        dist.all_reduce(lengths, dist.ReduceOp.MAX, group=groups.stage)
        longest, shortest, doubtful = (int(number) for number in lengths)
        self.even = longest == -shortest and not doubtful
        self._longest = None if longest == unknown else longest

    def __len__(self) -> int:
        if self.even is None:
            return len(self._loader)  # type: ignore[arg-type]  # a TypeError is what callers expect of one without
        if self._longest is None:
            raise TypeError("the length of a loader is not known in all pipelines")
        return self._longest

    def __iter__(self) -> Iterator[Any]:
        seed = self._seed()
        self._repetition = self._repetition + 1 if seed == self._last else 0
        self._last = seed
        with _drawing(*seed, self._repetition, 0):
            batches = iter(self._loader)
        for number in count(1):
            with _drawing(*seed, self._repetition, number):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch


@contextmanager
def _drawing(*key: int) -> Iterator[None]:
    """Within, draws come from the stream of ``key``. What they were does not matter to what follows."""
    before = _STREAMS.current
    _STREAMS.begin(*key)
    try:
        yield
    finally:
        _STREAMS.leave(_FETCHING, before)


def shared_seed() -> int:
    """A seed that all ranks share, from rank 0's generator; every rank must call it."""
    return shared(torch.initial_seed() % 2**62)


def shared(number: int) -> int:
    """Rank 0's number, on all ranks; every rank must call it."""
    first = torch.tensor(number)
    dist.broadcast(first, 0)
    return int(first)


def stand_in(shape: Sequence[int]) -> Tensor:
    """What a loader may give, without reading the data, for inputs that this worker's stage does not compute with.

    Its float32 values are not numbers, so that a stage that does compute with them is noticed; it takes no memory.
    """
    return torch.full((), torch.nan).expand(*shape)


def check_equal(batch: Any, groups: ProcessGroups) -> None:
    """Compares a batch between the stages of this pipeline; all of them must call it.

    Of a tensor that is a :func:`stand_in` on some stages, shapes are compared there.

    Raises:
        WorkerFailedError: one of them is gone.
        ConfigurationError: they were given different batches.
    """
    tensors = list(tensors_in(batch))
    counts = _on_all_stages([len(tensors)], groups)
    same = len(set(counts)) == 1
    if same:
        shapes = _on_all_stages([_digest(repr(tuple(tensor.shape)).encode()) for tensor in tensors], groups)
        values = _on_all_stages([_value_digest(tensor) for tensor in tensors], groups)
        same = len(set(shapes)) == 1 and all(len({*column} - {_STAND_IN}) <= 1 for column in zip(*values, strict=True))
    if not same:
        raise ConfigurationError(
            "The stages of a pipeline were given different batches, so outputs would not belong to labels. Draw random "
            "numbers in the dataset and in collate_fn from the generators of torch, numpy and random (which are in "
            "step here), not from one that is seeded per process, and let a custom sampler depend on "
            "trainer.strategy.distributed_sampler_kwargs instead of the rank."
        )


def check_equal_split(signatures: Sequence[object], groups: ProcessGroups) -> None:
    """Compares how the module's own ``split_batch`` has split a batch between the stages; all of them must call it.

    Raises:
        WorkerFailedError: one of them is gone.
        ConfigurationError: shapes of the parts differ.
    """
    if len(set(_on_all_stages([_digest(repr(signatures).encode())], groups))) > 1:
        raise ConfigurationError(
            "split_batch returned batches of other shapes on some stages of a pipeline than on others. Let it depend "
            "on nothing but the batch and n: every stage splits the same batch for itself."
        )


_STAND_IN = 0


def _value_digest(tensor: Tensor) -> int:
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point() and tensor.isnan().all():
        return _STAND_IN
    return _digest(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big", signed=True)


def _on_all_stages(numbers: Sequence[int], groups: ProcessGroups) -> list[tuple[int, ...]]:
    mine = torch.tensor(numbers, dtype=torch.int64)
    stages = [torch.zeros_like(mine) for _ in range(groups.mesh.num_stages)]
    with waiting_for(groups.pipeline, "comparing batches"):
        dist.all_gather(stages, mine, group=groups.pipeline)
    return [tuple(stage.tolist()) for stage in stages]
