"""Batches of a loader that are dealt to this pipeline.

The indices go through the user's own DataLoader, with its workers and its prefetching. Its batch sampler runs ahead of
training by the prefetched batches, and asks for a lease when the previous one is used up. If answers have been slow, as
from a scheduler that is far away, it asks two batches earlier, and is answered while these are trained. An empty lease
ends the loader's iterator: prefetched batches are trained, then the next request may take as long as other pipelines
need.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from lightning_sdpipe import meter
from lightning_sdpipe.data.loader import Drawn, drawing_copy, naming_the_limit
from lightning_sdpipe.data.shards import Shards
from lightning_sdpipe.dealing.leases import Lease, Segment
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.random_streams import beginning_again, mix

Ask = Callable[..., Lease | None]
"""Function that gets the lease of a segment and ordinal, perhaps within a number of seconds, as
:meth:`lightning_sdpipe.scheduler.client.client.SchedulerClient.lease` does."""


@dataclass(frozen=True)
class DealtBatch:
    """A batch: the ``data`` of batch ``number`` of shard ``home``.

    ``position`` is its number in the epoch, N × ``number`` + ``home``, whichever pipeline trains it; ``progress`` is
    the predicted number of batches of the epoch that all pipelines together have trained before it.
    """

    data: Any
    home: int
    number: int
    position: int
    progress: float


class DealtBatches:
    """The batches of ``loader`` that are dealt to this pipeline.

    Args:
        loader: a loader with a DistributedSampler of this pipeline, for which
            :func:`~lightning_sdpipe.data.shards.why_sharded` returns None. It is left unchanged.
        num_pipelines: N.
        ask: gets a lease; waits for the answer.
    """

    def __init__(self, loader: DataLoader[Any], num_pipelines: int, ask: Ask) -> None:
        self.shards = Shards(loader)
        self._num_pipelines = num_pipelines
        self._given: deque[tuple[Lease, int]] = deque()
        self._sampler = _LeaseSampler(self.shards, num_pipelines, ask, self._given)
        self._epoch: tuple[int, int] | None = None
        self._iterator: Iterator[Any] | None = None
        self._loader = drawing_copy(loader, self._sampler)

    def begin(self, segment: Segment, seed: int) -> None:
        """Begin ``segment``, which is dealt from now on; ``seed`` is the run's, equal on all workers.

        Raises:
            ConfigurationError: a shard is shorter than its length.
        """
        self._iterator = None
        self._given.clear()
        if (segment.run, segment.epoch) != self._epoch:
            self._epoch = segment.run, segment.epoch
            self.shards.begin(mix(seed, segment.epoch))
        self._sampler.begin(segment, seed)

    def take(self) -> DealtBatch | None:
        """Return the next batch; None when there is none until :meth:`wait`. Never waits for other pipelines.

        Raises:
            ConfigurationError: the loader gives more or fewer batches than its sampler.
        """
        with beginning_again(), meter.phase(meter.DATA), naming_the_limit:
            if self._iterator is None:
                if self._sampler.stands_still:
                    return None
                self._iterator = iter(self._loader)
            data = next(self._iterator, _NOTHING)
        if (data is _NOTHING) != (not self._given):
            raise another_number(self._loader, bool(self._given), "give data='sharded' otherwise")
        if data is _NOTHING:
            self._iterator = None
            return None
        lease, k = self._given.popleft()
        number = lease.start + k
        position = number * self._num_pipelines + lease.home
        return DealtBatch(data, lease.home, number, position, lease.progress + k * lease.advance)

    def wait(self, *seconds: float) -> bool | None:
        """Wait until there is more to take, and return True; return False once the segment has ended for all, and None
        after ``seconds``. All taken batches must be trained, and reported to the scheduler, or the wait is in vain."""
        return self._sampler.wait(*seconds)

    @property
    def stop(self) -> int:
        """Number at which the segment has ended, once :meth:`wait` has returned False."""
        return self._sampler.stop


class NumberedBatches:
    """The batches of an evaluation, of which this pipeline loads those of given numbers.

    Args:
        loader: a loader with the DistributedSampler of a single replica, for which
            :func:`~lightning_sdpipe.data.shards.why_sharded` returns None. It is left unchanged.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._shards = Shards(loader)
        self._seed = 0
        self._numbers: Sequence[int] = ()
        self._copy = drawing_copy(loader, self)

    def begin(self, seed: int, number: int) -> int:
        """Begin an evaluation of the first ``number`` batches; ``seed`` is equal on all workers. Return a checksum of
        the samples in each batch, by which pipelines see whether they mean the same batches."""
        self._seed = seed
        self._shards.begin(seed)
        sums = 0
        for k in range(number):
            sums = zlib.crc32(repr(self._shards.batch(0, k)).encode(), sums)
        return sums

    def take(self, numbers: Sequence[int]) -> Iterator[tuple[Any, int]]:
        """Yield the batches of those numbers, in that order, and their numbers.

        Raises:
            ConfigurationError: the loader gives more or fewer batches than its sampler.
        """
        if not numbers:
            return
        self._numbers = numbers
        with isolate_rng(include_cuda=False):
            batches = iter(self._copy)
        for number in (*numbers, None):
            with isolate_rng(include_cuda=False), meter.phase(meter.DATA), naming_the_limit:
                data = next(batches, _NOTHING)
            if (data is _NOTHING) != (number is None):
                raise another_number(self._copy, number is not None, "leave it to a plain DataLoader otherwise")
            if number is not None:
                yield data, number

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Drawn]:
        return (Drawn(mix(self._seed, number), self._shards.batch(0, number)) for number in self._numbers)


def another_number(loader: DataLoader[Any], fewer: bool, instead: str) -> ConfigurationError:
    """Return the error for a loader that gave another number of batches than its sampler."""
    return ConfigurationError(
        f"{type(loader).__name__} gave {'fewer' if fewer else 'more'} batches than its sampler. To divide them among "
        f"pipelines, each must belong to one batch of indices; {instead}."
    )


_NOTHING = object()
_FAR = 0.02
"""Seconds: if an answer takes longer, later leases are asked for ahead of time."""
_AHEAD = 2
"""Batches of a lease that are left when the next one is asked for then."""


class _LeaseSampler:
    """A sampler that gives batches of indices, lease by lease. It stops at an empty lease, and goes on after
    :meth:`wait`."""

    def __init__(self, shards: Shards, num_pipelines: int, ask: Ask, given: deque[tuple[Lease, int]]) -> None:
        self._shards = shards
        self._num_pipelines = num_pipelines
        self._ask = ask
        self._given = given
        self._is_far = False
        self.stands_still = True

    def begin(self, segment: Segment, seed: int) -> None:
        self._segment, self._seed = segment, seed
        self._ordinal = 0
        self._lease: Lease | None = None
        self._used = 0
        self._early: Lease | None = None
        self.stands_still = False

    def __len__(self) -> int:
        return len(self._shards)

    def __iter__(self) -> _LeaseSampler:
        return self

    def __next__(self) -> Drawn:
        while self._lease is None or self._used == self._lease.size:
            if self.stands_still:
                raise StopIteration
            self._next_lease()
        lease, k = self._lease, self._used
        self._used += 1
        if self._is_far and self._early is None and lease.size - self._used < _AHEAD:
            self._early = self._ask(self._segment, self._ordinal, 0.0)
        self._given.append((lease, k))
        number = lease.start + k
        position = number * self._num_pipelines + lease.home
        return Drawn(mix(self._seed, lease.segment.epoch, position), self._shards.batch(lease.home, number))

    @property
    def stop(self) -> int:
        assert self._lease is not None
        return self._lease.stop

    def wait(self, *seconds: float) -> bool | None:
        while self._next_lease(*seconds):
            assert self._lease is not None
            if self._lease.size or self._lease.over:
                return not self.stands_still
        return None

    def _next_lease(self, *seconds: float) -> bool:
        lease, self._early = self._early, None
        if lease is None:
            began, at_once = time.monotonic(), self._lease is not None and self._lease.size > 0
            lease = self._ask(self._segment, self._ordinal, *seconds)
            if at_once:
                self._is_far |= time.monotonic() - began > _FAR
        if lease is None:
            return False
        self._lease = lease
        self._ordinal += 1
        self._used = 0
        self.stands_still = lease.size == 0
        return True
