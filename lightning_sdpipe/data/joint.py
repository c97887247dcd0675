"""Joint batches, whose micro-batches all pipelines divide among themselves by their speed.

Round r joins batch r of every home shard. Each of these is cut into P micro-batches as always, so there are N × P at
fixed positions, whichever pipeline trains them (:mod:`~lightning_sdpipe.dealing.joint_rounds`). Equal speeds give each
pipeline its own shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader

from lightning_sdpipe import meter
from lightning_sdpipe.data.dealt import another_number
from lightning_sdpipe.data.loader import Drawn, drawing_copy, naming_the_limit
from lightning_sdpipe.data.shards import Shards
from lightning_sdpipe.dealing.joint_rounds import PartKey
from lightning_sdpipe.pipeline.micro_batches import Portion, part_sizes
from lightning_sdpipe.random_streams import beginning_again, mix

_NOTHING = object()


class PlacedBatches:
    """Batches of ``loader`` that are put together from micro-batches at given places.

    Args:
        loader: a loader with a DistributedSampler, for which :func:`~lightning_sdpipe.data.shards.why_sharded` returns
            None. It is left unchanged.
        num_pipelines: N.
        parts: P, micro-batches of a shard's batch.
    """

    def __init__(self, loader: DataLoader[Any], num_pipelines: int, parts: int) -> None:
        self._shards, self._num_pipelines, self._parts = Shards(loader), num_pipelines, parts
        self._epoch: int | None = None
        self._seed = 0
        self._turns: Iterator[Sequence[PartKey]] = iter(())
        self._given: deque[tuple[Sequence[PartKey], Portion]] = deque()
        self._iterator: Iterator[Any] | None = None
        self._loader = drawing_copy(loader, self)

    def begin(self, epoch: int, seed: int) -> None:
        """Begin a part of ``epoch``; ``seed`` is the run's, equal on all workers."""
        if epoch != self._epoch:
            self._shards.begin(mix(seed, epoch))
        self._epoch, self._seed, self._iterator = epoch, seed, None

    def take(self, places: Sequence[PartKey], ahead: Iterator[Sequence[PartKey]]) -> tuple[Any, Portion]:
        """Return the batch of the micro-batches at ``places``, and the portion, which is the whole of it. The loader
        may prefetch those of ``ahead``, as long as they turn out to be the next.

        Raises:
            ConfigurationError: the loader gives fewer batches than its sampler.
        """
        with beginning_again(), meter.phase(meter.DATA), naming_the_limit:
            while self._given and self._given[0][0] != places:
                self._iterator = None
                self._given.clear()
            if self._iterator is None or not self._given:
                self._given.clear()
                self._turns = chain([places], ahead)
                self._iterator = iter(self._loader)
            data = next(self._iterator, _NOTHING)
        if data is _NOTHING:
            raise another_number(self._loader, True, "leave batch_by_speed out otherwise")
        return data, self._given.popleft()[1]

    def close(self) -> None:
        """End the loader's processes; it refers to these batches, which refer to it."""
        self._iterator = None

    def samples(self, number: int) -> float:
        """Return the samples of round ``number`` for each pipeline, on average."""
        return sum(len(self._shards.batch(home, number)) for home in range(self._num_pipelines)) / self._num_pipelines

    def __len__(self) -> int:
        return len(self._shards)

    def __iter__(self) -> Iterator[list[Drawn]]:
        for places in self._turns:
            of_portion, sizes, drawn = [], [], []
            for home, number, part in places:
                batch = self._shards.batch(home, number)
                all_sizes = part_sizes(len(batch), self._parts)
                start, place = sum(all_sizes[:part]), (number * self._num_pipelines + home, part)
                indices = batch[start : start + all_sizes[part]]
                drawn.append(Drawn(mix(self._seed, self._epoch or 0, *place), indices))
                of_portion.append(place)
                sizes.append(all_sizes[part])
            self._given.append((places, Portion(tuple(of_portion), tuple(sizes), sum(sizes))))
            yield drawn
