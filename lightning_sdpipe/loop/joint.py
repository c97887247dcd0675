"""Turns of Lightning's loop in which all pipelines train one batch together, each as many micro-batches of it as its
speed allows.

Pipelines tell each other how long they compute for a micro-batch: after a few rounds, then less and less often. From
that all workers derive the same next division (:mod:`~lightning_sdpipe.dealing.joint_rounds`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_sdpipe.data.joint import PlacedBatches
from lightning_sdpipe.data.shards import why_sharded
from lightning_sdpipe.dealing.joint_rounds import JointRounds
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


class OwnPart:
    """This worker's part of joint batches: its micro-batches of each turn, and how long it computes for them.

    Args:
        trainer: about to fit.
        groups: this worker's process groups.
        delays: measures how long this worker computes.
        division: P, the micro-batches of a mini-batch at equal speeds, and the number of which the schedule needs a
            multiple.
    """

    def __init__(
        self, trainer: Trainer, groups: ProcessGroups, delays: DelayInjector, division: tuple[int, int]
    ) -> None:
        self._trainer, self._delays, mesh = trainer, delays, groups.mesh
        self.pipeline, self._num_pipelines, depths = mesh.locate(groups.rank)[1], mesh.num_pipelines, mesh.depths
        self._parts, unit = division
        self.rounds = JointRounds(  # all pipelines of an elastic run have one depth
            self._num_pipelines, self._parts, unit, lambda pipeline: depths[pipeline % len(depths)] - 1
        )
        self._batches: PlacedBatches | None = None
        self._counted = 0.0

    @property
    def batches(self) -> PlacedBatches:
        """Batches that are divided."""
        assert self._batches is not None, "deal() has taken them"
        return self._batches

    def deal(self, loader: Any, reason: str | None = None) -> None:
        """Divide the batches of ``loader`` from now on, unless there is a ``reason`` against it.

        Raises:
            ConfigurationError: they cannot be divided.
        """
        if reason is None and loader.batch_sampler is None:
            reason = "a loader with batch_size=None gives whole batches"
        if reason is not None:
            raise refuse_to_divide(reason)
        refuse_small_last_batch(self._trainer, loader, self._parts)
        self._batches = PlacedBatches(loader, self._num_pipelines, self._parts)

    def begin(self) -> None:
        """Begin a fit.

        Raises:
            ConfigurationError: the module splits or weighs its batches itself.
        """
        module = self._trainer.lightning_module
        for name in ("split_batch", "weigh_batch"):
            if hasattr(module, name):
                raise refuse_to_divide(f"{type(module).__name__} has a {name}, and here each sample counts alike")
        self._delays.measures = True
        self.computed()

    def end(self) -> None:
        """End the fit, and with it the loader's processes."""
        if self._batches is not None:
            self._batches.close()
        self._batches, self._delays.measures = None, False

    def computed(self) -> float:
        """Return the seconds for which this worker has computed since it was last asked."""
        before, self._counted = self._counted, self._delays.computed_seconds + self._delays.injected_seconds
        return self._counted - before

    def take(self) -> tuple[Any, Portion | None]:
        """Return this pipeline's micro-batches of the next turn as one batch, and which they are; None for both without
        any."""
        mine = self.rounds.turn().get(self.pipeline)
        return self.batches.take(mine, self.rounds.ahead(self.pipeline)) if mine else (None, None)


class JointBatchSource:
    """The source of this worker's part of batches that all pipelines train together.

    Args:
        trainer: about to fit.
        groups: this worker's process groups.
        own: this worker's part.
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
        own: OwnPart,
        seed: Callable[[], int],
        origin: Callable[[], Split | None],
    ) -> None:
        self._trainer, self._groups, self._own, self._seed, self._origin = trainer, groups, own, seed, origin
        self._everyone = range(len(groups.mesh.depths))
        self.portion: Portion | None = None
        """The portion of the joint batch that this turn's batch is."""
        self._at: tuple[int, int] | None = None  # epoch and round that come next
        self._trained: int | None = None  # micro-batches since the last look; None before the first

    def deal(self, loader: Any, split: Split | None) -> None:
        """Divide the batches of ``loader`` from now on; ``split`` says how its data are split.

        Raises:
            ConfigurationError: they cannot be divided.
        """
        self._own.deal(loader, why_sharded(loader, self._own.pipeline, self._groups.mesh.num_pipelines))
        self._loader, self._split, self._at = loader, split, None

    def change(self) -> None:
        """Begin a fit; see :meth:`OwnPart.begin`."""
        self._own.begin()

    def close(self) -> None:
        """End the fit; see :meth:`OwnPart.end`."""
        self._own.end()
        self.portion = None

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
        own, joint = self._own, self._own.rounds
        if here != self._at:
            joint.begin(number, len(own.batches))
            own.batches.begin(epoch, self._seed())
        if joint.looks:
            joint.divide_by(dict(enumerate(self._measured())))
        data, portion = own.take()
        assert portion is not None, "each pipeline has a part"
        joint.ended(self._everyone, self._everyone, {}, epoch=0)
        self.portion = replace(portion, samples=own.batches.samples(number))
        self._at = epoch, number + 1
        if self._trained is not None:
            self._trained += len(portion.sizes)
        return data, number + 1

    def _measured(self) -> list[float]:
        """Return the seconds that each pipeline has computed for a micro-batch since the last comparison: its slowest
        stage's. At first they are 0, for unknown: a first round makes what later ones find."""
        computed = self._own.computed()
        mine = torch.zeros(len(self._everyone), device=self._trainer.strategy.root_device)
        if self._trained:
            mine[self._own.pipeline] = computed / self._trained
        self._trained = 0
        with waiting_for(self._groups.world, "comparing speeds"):
            dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._groups.world)
        found: list[float] = mine.tolist()
        return found


def refuse_small_last_batch(trainer: Trainer, loader: Any, parts: int) -> None:
    """Raise ConfigurationError if a fit will come to a last batch that has fewer samples than micro-batches."""
    if trains_whole_epochs(trainer):
        part_sizes(last_batch_size(loader, 1) or parts, parts)


def refuse_to_divide(reason: str) -> ConfigurationError:
    """Return the error for ``batch_by_speed=True`` where batches cannot be divided."""
    return ConfigurationError(
        f"batch_by_speed=True was given, but {reason}. Leave it out: each pipeline then trains its own batch."
    )
