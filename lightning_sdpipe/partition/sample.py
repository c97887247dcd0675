"""Takes a batch before training, to rehearse and measure with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_sdpipe.lightning_internals import goes_one_by_one


def copied(batch: Any) -> Any:
    """Return a copy of ``batch``, since a step may change it in place; or ``batch`` itself if it cannot be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # objects that cannot be copied raise errors of any kind
        return batch


def last_batch_size(loader: Any, shares: int) -> int | None:
    """Return the number of samples in the last batch of an epoch when the samples of ``loader`` are divided into
    ``shares`` equal parts; None if it is not known."""
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is not BatchSampler or batches.drop_last or isinstance(loader.dataset, IterableDataset):
        return None
    sampler: Any = batches.sampler
    try:
        samples = -(-len(sampler) // (1 if isinstance(sampler, DistributedSampler) else shares))
    except TypeError:  # a sampler need not know its length
        return None
    return samples % batches.batch_size or batches.batch_size


def sample_batch(dataloaders: Any, keep: bool = True) -> Any:
    """Return a batch as the dataloaders would give it, on the CPU.

    For a ``DataLoader`` over a map-style dataset, this collates the first samples, without touching the loader's
    sampler, generator and worker processes. It copies any other loader and iterates over the copy or, without ``keep``,
    over the loader itself. The random generators stay as they were.

    Args:
        dataloaders: one dataloader, or tuples, lists and dicts of them; the batch has the same structure.
        keep: whether the loaders will be used again.

    Raises:
        Exception: the exception that copying a loader raised.
    """
    if isinstance(dataloaders, CombinedLoader):
        dataloaders = dataloaders.flattened[0] if goes_one_by_one(dataloaders) else dataloaders.iterables
    with isolate_rng(include_cuda=False):
        return tree_map(partial(_first, copied=copy.deepcopy if keep else lambda value, _=None: value), dataloaders)


def _first(loader: Any, copied: Callable[..., Any]) -> Any:
    if not isinstance(loader, DataLoader):
        return next(iter(copied(loader)))
    if isinstance(loader.dataset, IterableDataset):
        loader = copied(loader)
        loader.num_workers = 0
        return next(iter(loader))
    dataset: Any = loader.dataset
    known = {id(dataset): dataset}  # samplers may hold it, and it may be large
    if loader.batch_sampler is None:  # automatic batching is off
        return loader.collate_fn(dataset[next(iter(copied(loader.sampler, known)))])
    size = getattr(loader.batch_sampler, "batch_size", None)
    whole = range(min(size, len(dataset))) if size else next(iter(copied(loader.batch_sampler, known)))
    together = getattr(dataset, "__getitems__", None)
    return loader.collate_fn(together([*whole]) if together else [dataset[index] for index in whole])
