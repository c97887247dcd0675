"""Batches of every home shard: those that each replica of a DistributedSampler would train, as indices of the
dataset."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.seed import isolate_rng
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.random_streams import mix, seed_generators


def why_sharded(loader: Any, pipeline: int, num_pipelines: int) -> str | None:
    """Return why the batches of ``loader`` cannot be dealt to any free pipeline; None if they can.

    If they cannot, each pipeline trains its own shard, in which no sample is missing, as fast as it can.
    """
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} is not a DataLoader, so its batches cannot be given to another pipeline"
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset is read in order, so no pipeline can be given a part of it"
    if not getattr(loader, "in_order", True):
        return "DataLoader(in_order=False) gives batches in an order that is not known beforehand"
    if isinstance(loader, Stateful):
        return f"a {type(loader).__name__} decides by itself (state_dict) where in its own shard it resumes"
    batches = _index_sampler(loader)
    if not hasattr(batches, "__len__"):
        return f"the batch sampler {type(batches).__name__} has no length; give it a __len__"
    sampler = _distributed(batches)
    if sampler is None:
        return (
            f"no DistributedSampler was found in {type(batches).__name__}: none of its attributes holds "
            "one, or Trainer(use_distributed_sampler=False) was given"
        )
    if (sampler.num_replicas, sampler.rank) != (num_pipelines, pipeline):
        return (
            f"its sampler is that of replica {sampler.rank} of {sampler.num_replicas}, and this is pipeline {pipeline} "
            f"of {num_pipelines}; let Lightning make it, or give it trainer.strategy.distributed_sampler_kwargs"
        )
    if len(batches) == 0:
        return "a pipeline has no batch in an epoch; use more data, a smaller batch size or drop_last=False"
    try:
        _copied(batches, loader)
    except Exception as error:
        return f"its sampler cannot be copied for the other shards ({type(error).__name__}: {error})"
    return None


def takes_turns(loader: Any) -> bool:
    """Return whether replicas take the samples of an epoch in turn, in an order that does not depend on their
    number."""
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    return type(batches) is BatchSampler and type(sampler) in (DistributedSampler, DistributedSamplerWrapper)


def refuse_to_deal(reason: str) -> ConfigurationError:
    """Return the error for ``data="dealt"`` where batches cannot be dealt."""
    return ConfigurationError(
        f"data='dealt' was given, but {reason}. Or pass data='sharded': each pipeline then trains its own shard."
    )


class Shards:
    """Batches of ``loader``'s N shards, epoch after epoch.

    Args:
        loader: Lightning's loader with a DistributedSampler of this pipeline, for which :func:`why_sharded` returns
            None.

    Draws of a user's sampler come from one stream per (seed, epoch), so that all pipelines know the same shards,
    whichever pipeline trains them.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._source: Any = None
        self._seed = 0
        self._known: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        """Return the number of batches of each shard."""
        return len(_index_sampler(self._loader))

    def begin(self, seed: int) -> None:
        """Begin a new epoch, of which the loader's samplers have been told."""
        self._known.clear()
        self._seed = seed
        # State that a sampler keeps (a generator, say) goes on from epoch to epoch, and the shards begin alike in each.
        live = _index_sampler(self._loader)
        self._source = _copied(live, self._loader)
        mine = _distributed(live)
        assert mine is not None
        with _drawing(mix(seed)):
            self._known[mine.rank] = self._checked(list(live), mine.rank)

    def batch(self, home: int, number: int) -> Any:
        """Return the indices of batch ``number`` of shard ``home`` (one index if the loader does not batch)."""
        if home not in self._known:
            batches = _copied(self._source, self._loader)
            sampler = _distributed(batches)
            assert sampler is not None
            sampler.rank = home
            with _drawing(mix(self._seed)):
                self._known[home] = self._checked(list(batches), home)
        return self._known[home][number]

    def _checked(self, batches: list[Any], home: int) -> list[Any]:
        if len(batches) < len(self):
            raise ConfigurationError(
                f"The sampler gave {len(batches)} batches for the shard of pipeline {home}, and its length is "
                f"{len(self)}. Dealt batches need shards that are as long as len() says, the same for each pipeline; "
                "or pass data='sharded'."
            )
        return batches


def _index_sampler(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def distributed_sampler(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    """Return the DistributedSampler that gives ``loader`` its samples; None if there is none."""
    return _distributed(_index_sampler(loader))


def _distributed(batches: Any) -> DistributedSampler[Any] | None:
    """Return the DistributedSampler that ``batches`` are made from; None if there is none."""
    if isinstance(batches, DistributedSampler):
        return batches
    inside = vars(batches).values() if hasattr(batches, "__dict__") else ()
    return next((value for value in inside if isinstance(value, DistributedSampler)), None)


def _copied(batches: Any, loader: DataLoader[Any]) -> Any:
    return copy.deepcopy(batches, {id(loader.dataset): loader.dataset})  # which may be large


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    with isolate_rng(include_cuda=False):
        seed_generators(seed)
        yield
