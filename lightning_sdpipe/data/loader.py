"""Loader of a pipeline's batches with reproducible random shuffling, augmentation and masking.

Random numbers of loading come from streams that depend on neither worker nor process. A sampler draws from the stream
of the epoch, which is the same in all pipelines, so that their shards do not overlap. The data set and the collate
function draw from the stream of the batch, (seed, epoch, position), as they do where batches are dealt. So their draws
are equal on all stages of a pipeline: the first one needs the masked words and the last one the labels that belong to
them.

An iterable data set is a sampler and a data set in one. All its draws come from the stream of the epoch, or every
pipeline would take its part of a different permutation.
"""

from __future__ import annotations

import copy
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
    get_worker_info,
)

from lightning_sdpipe import meter
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.random_streams import AFTER, RandomStreams, Stream, mix, seed_generators, set_states, states
from lightning_sdpipe.topology.groups import ProcessGroups

_STREAMS = RandomStreams(torch.device("cpu"))
_FETCHING = -1  # in the place of a block's number
_END = object()
_OF_PIPELINES = ("even", "state_dict", "load_state_dict")


class PipelineLoader:
    """A data loader whose random draws come from seeds of the run.

    Args:
        loader: any iterable of batches; its other attributes stay reachable. Saving and loading of its state go to the
            copy whose batches are given.
        pipeline: number of this pipeline.
        num_pipelines: N.
        seed: returns non-negative integers that are equal on all workers, and differ between epochs.

    Raises:
        ConfigurationError: Lightning has put a sampler into the loader, so that it would give samples instead of
            batches.
    """

    def __init__(
        self, loader: Iterable[Any], pipeline: int, num_pipelines: int, seed: Callable[[], tuple[int, ...]]
    ) -> None:
        _refuse_lost_batches(loader)
        self._loader = loader
        self._seed = seed
        self._last: tuple[int, ...] = ()
        self._repetition = 0
        self._longest: int | None = None
        self.even: bool | None = None
        """Whether all pipelines are certain to get equally many batches. Known after :meth:`compare`."""
        init = getattr(loader, "worker_init_fn", None)
        if isinstance(init, partial) and init.func is pl_worker_init_function:
            loader.worker_init_fn = partial(pl_worker_init_function, rank=0)  # type: ignore[attr-defined]
        self._draws: _Positions | DrawingCollate | None = None
        self._source = loader
        self._replaced: Set[str] = frozenset()
        if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
            self._draws = DrawingCollate(loader.collate_fn, pipeline)
            self._source = with_collate(loader, self._draws)
            self._replaced = {"collate_fn", "_iterator"}
        elif isinstance(loader, DataLoader):
            batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            self._draws = _Positions(batches, pipeline, num_pipelines)
            self._source = drawing_copy(loader, self._draws)
            self._replaced = {name for name, value in vars(self._source).items() if value is not vars(loader).get(name)}
            self._replaced |= {"worker_init_fn", "generator", "_iterator"}
        self._shared = dict(getattr(loader, "__dict__", {}))
        if isinstance(self._source, Stateful):
            self.state_dict, self.load_state_dict = self._source.state_dict, self._source.load_state_dict
        # Draws of a plain loader are its sampler's or its data set's. Those of any other loader are unknown.
        self._plain = isinstance(self._draws, _Positions) and type(loader).__iter__ is DataLoader.__iter__

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)  # which is not there while it is unpickled

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in _OF_PIPELINES:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def _share_attributes(self) -> None:
        """Give the copy what hooks have set on the loader since, and the loader what the copy has: a subclass may keep
        state there."""
        loader, copied = vars(self._loader), vars(self._source)
        for name in (loader.keys() | copied.keys()) - self._replaced:
            mine, theirs = loader.get(name), copied.get(name)
            if mine is not theirs:
                loader[name] = copied[name] = theirs if mine is self._shared.get(name) else mine
            self._shared[name] = loader.get(name)

    @property
    def skips(self) -> bool:
        """Whether :meth:`skip` is possible: by the indices of batches, if the loader does not keep its place itself."""
        return self._plain and sized_len(self._loader) is not None and not isinstance(self._source, Stateful)

    def skip(self, number: int) -> None:
        """Leave out the first ``number`` batches when the loader is iterated next, but never the last one: this
        pipeline's shard may be shorter than others."""
        assert isinstance(self._draws, _Positions)
        self._draws.done = min(number, len(self._draws) - 1)

    @property
    def given(self) -> Iterable[Any]:
        """The loader that this one was made of."""
        return self._loader

    @property
    def _iterator(self) -> Any:
        """Iterator by which Lightning ends workers that outlive an epoch."""
        return getattr(self._source, "_iterator", None)

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if hasattr(self._source, "_iterator"):  # as a DataLoader has
            self._source._iterator = iterator

    def compare(self, groups: ProcessGroups, device: torch.device) -> None:
        """Make the length that of the longest loader of all pipelines. Every rank must call it."""
        mine = sized_len(self._loader)
        trusted = isinstance(self._loader, DataLoader) and not isinstance(self._loader.dataset, IterableDataset)
        unknown = 2**62
        lengths = torch.tensor([unknown, -unknown, 1] if mine is None else [mine, -mine, int(not trusted)])
        lengths = lengths.to(device)
        dist.all_reduce(lengths, dist.ReduceOp.MAX, group=groups.meeting)
        longest, shortest, doubtful = (int(number) for number in lengths)
        self.even = groups.meeting.size() == 1 or (longest == -shortest and not doubtful)
        self._longest = None if longest == unknown else longest

    def __len__(self) -> int:
        if self.even is None:
            return len(self._loader)  # type: ignore[arg-type]  # a TypeError is what callers expect of one without
        if self._longest is None:
            raise TypeError("the length of a loader is not known in all pipelines")
        return self._longest

    def __iter__(self) -> Iterator[Any]:
        key = self._seed()
        self._repetition = self._repetition + 1 if key == self._last else 0
        self._last = key
        if self._repetition:
            key = (*key, self._repetition)
        if self._draws is not None:
            self._draws.begin(*key)
        stream = Stream(mix(*key))
        if self._source is not self._loader:
            self._share_attributes()
        own = getattr(self._loader, "generator", None)
        if "generator" in self._replaced and own is not None and self._iterator is None:
            torch.empty((), dtype=torch.int64).random_(generator=own)  # as a DataLoader does, for its workers
        with _seeding_what_follows(), stream.drawn():
            batches = iter(self._source)
        nothing = nullcontext()
        while True:
            before = _STREAMS.current()
            try:  # as _seeding_what_follows, without the cost of a generator for each batch
                with nothing if self._plain else stream.drawn(), meter.phase(meter.DATA), naming_the_limit:
                    batch = next(batches, _END)
            finally:
                _STREAMS.begin(before, _FETCHING, AFTER)
            if batch is _END:
                if self._source is not self._loader:
                    self._share_attributes()
                return
            yield batch


def _refuse_lost_batches(loader: Any) -> None:
    """Refuse a loader that Lightning has made anew, for a plain ``BatchSampler``, with its own sampler and the
    loader's ``batch_size``, which is None there. Samples that are tensors would be silently taken for batches."""
    made = isinstance(loader, DataLoader) and type(loader.sampler) in (DistributedSampler, DistributedSamplerWrapper)
    if made and loader.batch_size is loader.batch_sampler is None and loader.collate_fn is default_collate:
        raise ConfigurationError(
            "The loader gives single samples to a collate function that makes batches: Lightning has put a distributed "
            "sampler into DataLoader(batch_sampler=BatchSampler(...)), of which the batch size is lost. Give "
            "DataLoader(batch_size=..., drop_last=..., sampler=...) instead, or a subclass of BatchSampler, or "
            "Trainer(use_distributed_sampler=False) with a sampler of each pipeline's own."
        )


class _NamingTheLimit:
    """A context that explains errors for lack of file descriptors for what worker processes send."""

    def __enter__(self) -> None:
        """Begin to take a batch."""

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and "ancdata" in str(error):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise ConfigurationError(
                "A batch did not come from a worker process of the loader: this process may open no more than "
                f"{soft} files, and each tensor that a worker sends takes one while it is kept. Raise the limit "
                f"(`ulimit -n {hard}`), or call torch.multiprocessing.set_sharing_strategy('file_system') in the "
                "script; keep no batches, and collate many small tensors into few."
            ) from error


naming_the_limit = _NamingTheLimit()


class _Positions:
    """Batches of indices, each with the seed of its samples' draws.

    Args:
        batches: the loader's own batches.
        pipeline: batch b of pipeline i is number b N + i of the epoch.
        num_pipelines: N.
    """

    def __init__(self, batches: Iterable[Any], pipeline: int, num_pipelines: int) -> None:
        self._batches = batches
        self._pipeline, self._num_pipelines = pipeline, num_pipelines
        self.done = 0
        """Batches that the next epoch leaves out: they were trained before."""

    def begin(self, *key: int) -> None:
        """Begin an epoch, of which all workers have the same ``key``."""
        self._key, self._stream, self._numbers = key, Stream(mix(mix(*key))), count()  # as dealt batches are drawn

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # a TypeError is what callers expect of one without

    def __iter__(self) -> Iterator[Drawn]:
        with self._stream.drawn():
            batches = iter(self._batches)
        done, self.done = self.done, 0
        begun, at_once, nothing = False, _draws_at_once(self._batches), nullcontext()
        for number in self._numbers:
            with nothing if begun and at_once else self._stream.drawn():
                try:
                    indices = next(batches)
                except StopIteration:
                    return
            begun = True
            if number < done:
                continue
            yield Drawn(mix(*self._key, number * self._num_pipelines + self._pipeline), indices)


def _draws_at_once(batches: Any) -> bool:
    """Return whether ``batches`` draw all their random numbers with the first batch. Otherwise each batch draws in the
    stream, which takes 0.2 ms."""
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    return type(sampler) in (DistributedSampler, DistributedSamplerWrapper, RandomSampler, SequentialSampler)


@contextmanager
def _seeding_what_follows() -> Iterator[None]:
    """Isolate random draws within the context from later ones."""
    before = _STREAMS.current()
    try:
        yield
    finally:
        _STREAMS.begin(before, _FETCHING, AFTER)


class Drawn(NamedTuple):
    """Indices to load (one index if the loader does not batch), and the seed of the draws."""

    seed: int
    indices: Any


class DrawingDataset:
    """A wrapper of ``dataset`` that takes :class:`Drawn`: transforms and the collate function draw from the batch's own
    stream.

    The generators are those of the loading process: a worker's, or the caller's, which restores them. Any other request
    of a loader goes to ``dataset``.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "dataset"), name)  # which is not there while it is copied

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, drawn: Drawn | Sequence[Drawn]) -> Any:
        if not isinstance(drawn, Drawn):
            return [sample for each in drawn for sample in self.__getitems__(each)]
        seed_generators(drawn.seed)
        together = getattr(self.dataset, "__getitems__", None)
        return together(drawn.indices) if together else [self.dataset[index] for index in drawn.indices]

    def __getitem__(self, drawn: Any) -> Any:
        if not isinstance(drawn, Drawn):
            return self.dataset[drawn]
        seed_generators(drawn.seed)
        return self.dataset[drawn.indices]


class DrawingCollate:
    """The ``collate`` function of a loader of an iterable data set. It draws from separate streams, so that the data
    set's stream goes on as if it drew nothing: pipelines make their batches at different points of that stream.

    Args:
        collate: the loader's own function.
        pipeline: number of this pipeline, whose batches draw other numbers than those of others.
    """

    def __init__(self, collate: Callable[[Any], Any], pipeline: int) -> None:
        self._collate = collate
        self._pipeline = pipeline

    def begin(self, *key: int) -> None:
        """Begin an epoch, of which all workers have the same ``key``."""
        self._key, self._number = key, 0

    def __call__(self, samples: Any) -> Any:
        if self._collate in (default_collate, default_convert):
            return self._collate(samples)
        info = get_worker_info()
        place = 0 if info is None else info.id + 1
        before = states()
        seed_generators(mix(*self._key, self._pipeline, place, self._number))
        self._number += 1
        try:
            return self._collate(samples)
        finally:
            set_states(before)


def _start_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Call the user's ``worker_init_fn``, if any, which sees the user's own dataset."""
    info = get_worker_info()
    assert info is not None  # this runs in a worker
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
    if init is not None:
        init(worker)


def drawing_copy(loader: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    """Return a copy of ``loader`` that loads the entries of ``batches``: for each batch a :class:`Drawn`, or
    several."""
    changes = {
        "sampler" if loader.batch_sampler is None else "batch_sampler": batches,
        "dataset": DrawingDataset(loader.dataset),
        "worker_init_fn": partial(_start_worker, loader.worker_init_fn) if loader.num_workers else None,
        "generator": None,  # a sampler may share it, and how often a loader begins anew depends on time
        "_iterator": None,
    }
    inner = copy.copy(loader)
    vars(inner).update(changes)  # a DataLoader's own assignments refuse some of them
    return inner


def with_collate(loader: DataLoader[Any], collate: Callable[[Any], Any]) -> DataLoader[Any]:
    """Return a copy of ``loader`` with another collate function."""
    inner = copy.copy(loader)
    vars(inner).update({"collate_fn": collate, "_iterator": None})
    return inner
