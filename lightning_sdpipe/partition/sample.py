"""A batch to measure with, taken before training."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset


def sample_batch(dataloaders: Any) -> Any:
    """A batch as the dataloaders would give it, on the CPU.

    From a ``DataLoader`` over a map-style dataset the first samples are taken and collated: its sampler, its
    generator and its worker processes are not touched. Anything else is iterated once from the start, which
    an iterable that cannot start again would notice. The random generators are left as they were.

    Args:
        dataloaders: one dataloader, or tuples, lists and dicts of them, which give a batch of the same
            structure.
    """
    with isolate_rng():
        return tree_map(_first, dataloaders)


def _first(loader: Any) -> Any:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return next(iter(loader))
    size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    if size is None:  # automatic batching is off, or a batch sampler of the user's own
        return next(iter(loader))
    dataset: Any = loader.dataset
    return loader.collate_fn([dataset[index] for index in range(min(size, len(dataset)))])
