"""Turns of Lightning's loop in which all pipelines train one batch together, each as many micro-batches of it as its
speed allows.

Pipelines tell each other how long they compute for a micro-batch: after a few rounds, then after ever more, up to
:data:`LONGEST`. The next division follows from that, equally on all workers. Loaders prefetch, so a division holds from
the round on that no worker has asked its loader for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_sdpipe.data.joint import PlacedBatches, divide
from lightning_sdpipe.data.shards import why_sharded
from lightning_sdpipe.dealing.joint_rounds import PartKey
from lightning_sdpipe.dealing.proportional import shares_by_speed
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity.injector import DelayInjector
from lightning_sdpipe.lightning_internals import DataFetcher, as_combined, profiled
from lightning_sdpipe.loop.batch_source import (
    Fetcher,
    Item,
    Split,
    begins_accumulation,
    find_place,
    gives,
    refuse_other_split,
)
from lightning_sdpipe.loop.loop import trains_whole_epochs
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.partition.sample import last_batch_size
from lightning_sdpipe.pipeline.micro_batches import Portion, part_sizes
from lightning_sdpipe.topology.groups import ProcessGroups

LONGEST = 32
"""Most rounds between two comparisons of the speeds, once these are known."""

WORTH = 0.95
"""Part of the slowest pipeline's time, at most, that a new division must take to replace the old one."""


class JointBatchSource:
    """This worker's part of batches that all pipelines train together.

    Args:
        trainer: about to fit.
        groups: this worker's process groups.
        delays: measures how long this worker computes.
        parts: P, micro-batches of a mini-batch at equal speeds.
        unit: the number of micro-batches whose multiple a schedule needs.
        seed: that of the run.
        origin: the split of the data that a checkpoint counts by, if one was loaded.
    """

    description = "one batch of all pipelines, divided by speed"
    resumes = True
    position = None  # micro-batches have their own

    def __init__(
        self,
        trainer: Trainer,
        groups: ProcessGroups,
        delays: DelayInjector,
        parts: int,
        unit: int,
        seed: Callable[[], int],
        origin: Callable[[], Split | None],
    ) -> None:
        self._trainer, self._groups, self._delays = trainer, groups, delays
        self._parts, self._unit, self._seed, self._origin = parts, unit, seed, origin
        self._stage, self._pipeline = groups.mesh.locate(groups.rank)
        self.counts = [parts] * groups.mesh.num_pipelines
        """Micro-batches of each pipeline, as last decided."""
        self.portion: Portion | None = None
        """Portion that this turn's batch is."""
        self._plan: list[tuple[int, Sequence[int]]] = []  # from which round of the epoch on
        self._at: tuple[int, int] | None = None  # epoch and round that come next
        self._rounds, self._look_at = 0, 1  # of this fit
        self._trained = 0  # micro-batches since the last look
        self._computed = 0.0

    def deal(self, loader: Any, split: Split | None) -> None:
        """Divide the batches of ``loader`` from now on; ``split`` says how its data are split.

        Raises:
            ConfigurationError: they cannot be divided.
        """
        reason = why_sharded(loader, self._pipeline, self._groups.mesh.num_pipelines)
        if reason is None and loader.batch_sampler is None:
            reason = "a loader with batch_size=None gives whole batches"
        if reason is not None:
            raise refuse_to_divide(reason)
        self._loader, self._split, self._at = loader, split, None
        refuse_small_last_batch(self._trainer, loader, self._parts)
        self._batches = PlacedBatches(loader, self._groups.mesh.num_pipelines, self._parts)
        self._ahead = int(self._largest([float(self._batches.ahead)])[0])

    def change(self) -> None:
        """Begin a fit.

        Raises:
            ConfigurationError: the module splits or weighs its batches itself.
        """
        refuse_own_split(self._trainer.lightning_module)
        self._delays.measures = True
        self._computed = self._seconds

    def close(self) -> None:
        """End the fit, and with it the loader's processes."""
        if self.portion is not None:
            self._batches.close()
        self._batches = self.portion = None  # type: ignore[assignment]  # none is asked for any more
        self._delays.measures = False

    def take_over(self, fetcher: DataFetcher) -> DataFetcher:
        """Return the fetcher of the epoch that begins."""
        if gives(self, fetcher):
            return fetcher
        if len(fetcher.combined_loader.flattened) > 1:
            raise refuse_to_divide("there are several train dataloaders, whose batches belong together")
        before = self._origin()
        if not find_place(self._trainer, before, self._split, self._loader):
            raise refuse_other_split(before, self._split)
        return Fetcher(fetcher, self)

    @property
    def zeroes_gradients(self) -> bool:
        """True if an accumulation begins; see :class:`~lightning_sdpipe.loop.batch_source.BatchSource`, as for the next
        two."""
        return begins_accumulation(self._trainer)

    def begin_epoch(self, fetcher: DataFetcher) -> None:
        fetcher.fetched, fetcher.done = 0, False

    def fetch(self, fetcher: DataFetcher) -> Item:
        with profiled(fetcher):
            batch, fetcher.fetched = self._next_round()
        fetcher.done = fetcher.fetched == int(self._trainer.num_training_batches)
        return as_combined(fetcher.combined_loader, batch), fetcher.fetched - 1, 0

    def _next_round(self) -> tuple[Any, int]:
        """Return the batch of the next round, and the number of the epoch's batches up to it."""
        here = self._trainer.current_epoch, int(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        epoch, number = here
        if here != self._at:
            self._plan = [(number, self.counts)]
            self._batches.begin(epoch, self._seed())
        if self._rounds == self._look_at:
            self._look(number + self._ahead)
        ahead = map(self._places, range(number + 1, len(self._batches)))
        data, portion = self._batches.take(self._places(number), ahead)
        self.portion = replace(portion, samples=self._batches.samples(number))
        self._at = epoch, number + 1
        self._rounds += 1
        self._trained += len(self.portion.sizes)
        return data, number + 1

    def _counts(self, number: int) -> Sequence[int]:
        return next(counts for start, counts in reversed(self._plan) if start <= number)

    def _places(self, number: int) -> list[PartKey]:
        """Return the micro-batches of round ``number`` that this pipeline trains."""
        return [(home, number, part) for home, part in divide(self._counts(number), self._parts)[self._pipeline]]

    def _look(self, number: int) -> None:
        """Compare the speeds of all workers. A new division holds from round ``number`` on."""
        first, bubbles = self._rounds == 1, [depth - 1 for depth in self._groups.mesh.depths]
        self._look_at += min(2 * self._rounds, LONGEST)
        seconds = self._measured()
        if first or min(seconds) <= 0:  # a first round makes what the others find
            return
        new = divided(seconds, self._parts, self._unit, bubbles)
        if _longest(new, seconds, bubbles) < WORTH * _longest(self.counts, seconds, bubbles):
            self.counts = new
            self._plan.append((number, new))

    def _measured(self) -> list[float]:
        """Return the seconds that each pipeline has computed for a micro-batch since the last comparison: its slowest
        stage's."""
        computed, self._computed = self._computed, self._seconds
        mine = [0.0] * len(self.counts)
        mine[self._pipeline] = (self._computed - computed) / max(1, self._trained)
        self._trained = 0
        return self._largest(mine)

    @property
    def _seconds(self) -> float:
        return self._delays.computed_seconds + self._delays.injected_seconds

    def _largest(self, numbers: Sequence[float]) -> list[float]:
        """Return each of ``numbers``, where it is largest; every worker must call it."""
        mine = torch.tensor(numbers, device=self._trainer.strategy.root_device)
        with waiting_for(self._groups.world, "comparing speeds"):
            dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._groups.world)
        found: list[float] = mine.tolist()
        return found


def divided(seconds: Sequence[float], parts: int, unit: int, bubbles: Sequence[int]) -> list[int]:
    """Return the micro-batches of each pipeline, by the ``seconds`` that each takes for one: ``parts`` on average.
    ``bubbles`` are the micro-batches' times for which each is idle in a round."""
    workers = {i: (bubble * each, unit * each) for i, (each, bubble) in enumerate(zip(seconds, bubbles, strict=True))}
    given = shares_by_speed(parts * len(seconds) // unit, workers)
    return [unit * given[i] for i in workers]


def _longest(counts: Sequence[int], seconds: Sequence[float], bubbles: Sequence[int]) -> float:
    return max((count + idle) * each for count, each, idle in zip(counts, seconds, bubbles, strict=True))


def refuse_own_split(module: Any) -> None:
    """Raise ConfigurationError if ``module`` splits or weighs its batches itself."""
    for name in ("split_batch", "weigh_batch"):
        if hasattr(module, name):
            raise refuse_to_divide(f"{type(module).__name__} has a {name}, and here each sample counts alike")


def refuse_small_last_batch(trainer: Trainer, loader: Any, parts: int) -> None:
    """Raise ConfigurationError if a fit will come to a last batch that has fewer samples than micro-batches."""
    if trains_whole_epochs(trainer):
        part_sizes(last_batch_size(loader, 1) or parts, parts)


def refuse_to_divide(reason: str) -> ConfigurationError:
    """Return the error for ``batch_by_speed=True`` where batches cannot be divided."""
    return ConfigurationError(
        f"batch_by_speed=True was given, but {reason}. Leave it out: each pipeline then trains its own batch."
    )
