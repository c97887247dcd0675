"""Comparison of the data sets of pipelines when training begins, or when another one joins.

Each pipeline takes its shard of what should be one data set. Where a script makes another one in each process, as by an
unseeded ``random_split``, pipelines train some samples twice and others never, and nothing fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from lightning_sdpipe.data.shards import distributed_sampler
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.partition.apart import apart
from lightning_sdpipe.random_streams import mix, seed_generators

_SAMPLES = 8
_READING, _ANSWERING = 3.0, 20.0  # seconds
_UNKNOWN = 0
_NOTHING = [_UNKNOWN] * (1 + _SAMPLES)


def unlike_samples(loader: Any, num_pipelines: int, group: dist.ProcessGroup) -> str | None:
    """Compare a few samples of ``loader``'s data set with those that the members of ``group`` have, one in each
    pipeline, which must all call this function. Return what differs, and why that may be; None if nothing does.

    A sample that is not the same when it is read again is skipped, and so are data sets of which no
    :class:`~torch.utils.data.DistributedSampler` gives each pipeline a shard. Samples are read in a forked child, so
    that no generator, file or cache of a data set is touched here; data sets that only index tensors need none.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return None
    sampler = distributed_sampler(loader) if isinstance(loader, DataLoader) else None
    is_sharded = sampler is not None and sampler.num_replicas == num_pipelines
    mine = torch.tensor(digests(loader) if is_sharded else _NOTHING)
    every = [torch.empty_like(mine) for _ in ranks]
    with waiting_for(group, "comparing samples"):
        dist.all_gather(every, mine, group=group)
    return difference("rank", dict(zip(ranks, torch.stack(every).tolist(), strict=True)))


def difference(members: str, every: Mapping[int, Sequence[int]]) -> str | None:
    """Return what differs between the :func:`digests` of members, each of which is a rank or a pipeline by its number,
    and why that may be; None if nothing does."""
    numbers = sorted(every, reverse=True)
    sizes, *samples = zip(*(every[number] for number in numbers), strict=True)
    names = ["the size", *(f"sample {place}" for place in _places(max(sizes)))]
    for name, found in zip(names, [sizes, *samples], strict=True):
        known = {value: number for number, value in zip(numbers, found, strict=True) if value != _UNKNOWN}
        if len(known) > 1:
            first, other, *_ = sorted(known.values())
            return (
                f"Pipelines have different training data: {name} on {members} {other} differs from that on {members} "
                f"{first}. Each pipeline trains its part of its own data, so some samples are trained twice and others "
                "never. Usual causes: random_split, or other random numbers in the script, without a seed (call "
                "L.seed_everything(1) first, because every process runs the script); labels or files in the order of a "
                "set or of a directory (sort them); a data set of which each rank takes its own part (pass "
                "Trainer(use_distributed_sampler=False) with it). Training continues."
            )
    return None


def digests(loader: Any) -> list[int]:
    """Return the size of the loader's data set, and a digest of each of some samples; 0 for what is not known."""
    if sys.platform != "linux" or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return _NOTHING
    try:
        size = len(loader.dataset)  # type: ignore[arg-type]
        if _only_indexes_tensors(loader.dataset):
            return [size, *(_digest(loader.dataset[place]) for place in _places(size))]
        return [size, *json.loads(apart(partial(_read, loader.dataset, _places(size)), _ANSWERING))]
    except Exception:  # what cannot be read is reported when it is trained
        return _NOTHING


def _only_indexes_tensors(dataset: Any) -> bool:
    """Return whether a sample of ``dataset`` is read without code of the user."""
    while type(dataset) is Subset and type(dataset.indices) in (list, range):
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and all(type(tensor) is Tensor for tensor in dataset.tensors)


def _places(size: int) -> list[int]:
    return [number * (size - 1) // (_SAMPLES - 1) for number in range(_SAMPLES)]


def _read(dataset: Any, places: Sequence[int]) -> bytes:
    found, end = [_UNKNOWN] * len(places), monotonic() + _READING
    for number, place in enumerate(places):
        twice = set()
        for _ in range(2):
            seed_generators(mix(place))
            twice.add(_digest(dataset[place]))
        if len(twice) == 1:
            found[number] = twice.pop()
        if monotonic() > end:
            break
    return json.dumps(found).encode()


def _digest(sample: Any) -> int:
    leaves, structure = tree_flatten(sample)
    number = crc32(repr(structure).encode())
    for leaf in leaves:
        number = crc32(_contents(leaf), number)
    return number or 1


def _contents(leaf: Any) -> bytes:
    """Return bytes that are equal for equal values: for objects of unknown kinds, those of the name of their class."""
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
        return repr((leaf.shape, leaf.dtype)).encode() + leaf.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, (str, bytes, int, float, complex)):
        return repr(leaf).encode()
    as_bytes = getattr(leaf, "tobytes", None)  # as arrays and images have it; those of objects give pointers
    if as_bytes is None or isinstance(leaf, Tensor) or str(getattr(leaf, "dtype", "")) == "object":
        return type(leaf).__qualname__.encode()
    contents: bytes = as_bytes()
    return contents
