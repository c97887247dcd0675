"""Draws that belong to a batch, whichever process loads it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, default_collate, default_convert, get_worker_info

from lightning_sdpipe.random_streams import mix, seed_generators, set_states, states


class Drawn(NamedTuple):
    """What to load (indices, or one index if the loader does not batch), and the seed of what that draws."""

    seed: int
    indices: Any


class DrawingDataset:
    """``dataset``, asked for :class:`Drawn`: transforms and the collate function draw from the batch's own stream.

    The generators are those of the process that loads: a worker's, or the caller's, which restores them. A loader that
    asks for anything else by itself asks ``dataset``.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.dataset, name)

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
    """The ``collate`` function of a loader of an iterable data set: it draws from streams of its own, so that the data
    set's go on as if it drew nothing. Pipelines make their batches at other points of that.

    Args:
        collate: the loader's own.
        pipeline: this one, whose batches draw other numbers than those of others.
    """

    def __init__(self, collate: Callable[[Any], Any], pipeline: int) -> None:
        self._collate = collate
        self._pipeline = pipeline

    def begin(self, *key: int) -> None:
        """An epoch, of which all workers have the same ``key``."""
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


class WorkerStart:
    """A loader's ``worker_init_fn``, which sees the user's own dataset."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None  # this runs in a worker
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self._init is not None:
            self._init(worker)


def drawing_copy(loader: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    """A copy of ``loader`` that loads what ``batches`` gives: for each batch a :class:`Drawn`, or several."""
    changes = {
        "sampler" if loader.batch_sampler is None else "batch_sampler": batches,
        "dataset": DrawingDataset(loader.dataset),
        "worker_init_fn": WorkerStart(loader.worker_init_fn) if loader.num_workers else None,
        "generator": None,  # a sampler may share it, and how often a loader begins anew depends on time
        "_iterator": None,
    }
    inner = copy.copy(loader)
    vars(inner).update(changes)  # a DataLoader's own assignments refuse some of them
    return inner


def with_collate(loader: DataLoader[Any], collate: Callable[[Any], Any]) -> DataLoader[Any]:
    """A copy of ``loader`` with another collate function."""
    inner = copy.copy(loader)
    vars(inner).update({"collate_fn": collate, "_iterator": None})
    return inner
